"""Start a trainer in a program, read its status, and stop it in order."""

import asyncio
import tempfile

import primerl


async def main() -> None:
    with tempfile.TemporaryDirectory() as outputs:
        args = ["@", "demo", "--output-dir", outputs, "--network.host", "127.0.0.1"]
        async with primerl.Node("train", args) as node:
            status = await node.status()
            print(f"{status.role} {status.short} is {status.phase}")
            ticket = await node.address()  # once its model and its environment are up
            print(f"others join it with a ticket of {len(ticket)} characters")


asyncio.run(main())
