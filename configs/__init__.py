"""Declared configuration: schema, presets, bundled models."""
