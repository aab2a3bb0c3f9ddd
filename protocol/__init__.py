"""What nodes say, and what of it they may believe. No I/O, no asyncio, no torch."""
