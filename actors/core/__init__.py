"""Pure decisions: numpy only. No Ray, no torch, no asyncio, no clock, no I/O."""
