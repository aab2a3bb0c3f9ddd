#!/usr/bin/env bash
# iroh 1.2.0 (Python binding): where a peer has two connections to one endpoint, from one machine or two with the same
# key, the later connection works, and none of the paths that paths() lists for it is ever selected. The first
# connection's are. So code that reads the address of a peer from the selected path finds none.
#
# One would guess otherwise: is_selected reads as a property of the connection's own path, and bytes go both ways on it.
#
# Output, 2026-11-29, CPython 3.11.7, x86_64, loopback without relays:
#
#     first connection    1 of 1 paths selected
#     second connection   0 of 1 paths selected, a byte went both ways
#
# Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet "iroh==1.2.0"

cat > paths.py <<'PYTHON'
import asyncio
import secrets

import iroh


async def bind(secret: bytes) -> iroh.Endpoint:
    builder = iroh.EndpointBuilder()
    builder.apply_minimal()
    builder.alpns([b"x"])
    builder.bind_addr("127.0.0.1:0")
    builder.relay_mode(iroh.RelayMode.disabled())
    builder.secret_key(secret)
    return await builder.bind()


async def accepted(server: iroh.Endpoint) -> iroh.Connection:
    connection = await (await (await server.accept_next()).accept()).connect()
    stream = await connection.accept_bi()
    assert await stream.recv().read_exact(1) == b"x"
    await stream.send().write_all(b"y")
    await stream.send().finish()
    return connection


async def called(client: iroh.Endpoint, target: iroh.EndpointAddr) -> iroh.Connection:
    connection = await client.connect(target, b"x")
    stream = await connection.open_bi()
    await stream.send().write_all(b"x")
    assert await stream.recv().read_exact(1) == b"y"
    return connection


def selected(connection: iroh.Connection) -> tuple[int, int]:
    paths = connection.paths()
    return sum(path.is_selected for path in paths), len(paths)


async def main() -> None:
    server, key = await bind(secrets.token_bytes(32)), secrets.token_bytes(32)
    [address] = [one for one in server.addr().direct_addresses() if one.startswith("127.")]
    target = iroh.EndpointAddr(server.id(), None, [address])
    held, clients = [], []
    for _ in range(2):
        clients.append(await bind(key))
        own, other = await asyncio.gather(accepted(server), called(clients[-1], target))
        held.append((own, other))
    await asyncio.sleep(2)
    (first, of_first), (second, of_second) = selected(held[0][0]), selected(held[1][0])
    print(f"first connection    {first} of {of_first} paths selected")
    print(f"second connection   {second} of {of_second} paths selected, a byte went both ways")
    assert first >= 1 and of_second >= 1 and second == 0, "iroh behaves otherwise now"
    for one in (*clients, server):
        await one.close()


asyncio.run(asyncio.wait_for(main(), 60))
PYTHON
env/bin/python paths.py
