"""Messages between nodes, and the rules for believing them. No I/O, no asyncio, no torch."""
