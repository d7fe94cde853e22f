"""Faults at random under load, and a checker that reads what happened (`dspark chaos`)."""
