"""What iroh's binding holds is freed by one thread, and nobody waits for it."""

import asyncio
import gc
import sys
import threading
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import until

from primerl.crypto.keys import SecretKey
from primerl.node.p2p import iroh
from primerl.node.p2p.transport import TransportError

DEADLINE_S = 60.0

CHILD = """
import asyncio, faulthandler, gc, sys, time

from primerl.crypto.keys import SecretKey
from primerl.node.p2p import iroh
from primerl.node.p2p.iroh import IrohTransport

if sys.argv[1] == "shipped":
    iroh.install_free_thread = lambda binding: None

async def main():
    ends = [
        IrohTransport(SecretKey.generate(), host="127.0.0.1", port=0, alpns=[b"x"]) for _ in "12"
    ]
    for end in ends:
        await end.start()
    near, far = await asyncio.gather(
        ends[0].connect(ends[1].node_id, ends[1].addresses(), b"x", deadline=20), ends[1].accept()
    )
    from iroh import iroh_ffi

    table = iroh_ffi._UniffiContinuationHandleMap._lock
    out = (await near._connection.open_bi()).send()
    await out.write_all(b"!")
    incoming = (await far._connection.accept_bi()).recv()
    await incoming.read_exact(1)
    faulthandler.dump_traceback_later(4, exit=True)
    for _ in range(5):
        dropped = (await far._connection.open_bi()).send()
        reading = asyncio.ensure_future(incoming.read_exact(1))
        await asyncio.sleep(0.05)
        writing = asyncio.ensure_future(out.write_all(b"!"))
        await asyncio.sleep(0)
        with table:  # as if the collector ran while a callback is looked up
            time.sleep(0.1)  # iroh's thread gets the byte, has the connection's lock, and wants the table
            del dropped
            gc.collect()
        await asyncio.gather(writing, reading)
    print("over", flush=True)
    faulthandler.cancel_dump_traceback_later()
    for end in ends:
        await end.close()

asyncio.run(main())
"""


async def run_child(binding: str) -> tuple[str, str]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CHILD, binding),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(DEADLINE_S):
        out, err = await child.communicate()
    return out.decode(), err.decode()


async def test_a_stream_that_is_dropped_under_the_lock_of_the_binding_holds_up_nobody() -> None:
    out, err = await run_child("repaired")
    assert out.strip() == "over", err


async def test_the_shipped_binding_still_waits_for_itself_there() -> None:
    out, err = await run_child("shipped")
    assert not out, (
        "this release of iroh frees its objects without waiting: remove node/p2p/iroh.py"
    )
    assert "__del__" in err


class Freed:
    """What objects of a binding told when they were freed."""

    def __init__(self) -> None:
        self.by: list[str] = []
        self.told = threading.Event()

    def note(self) -> None:
        self.by.append(threading.current_thread().name)
        self.told.set()


def binding(freed: Freed) -> Any:
    class Stream:
        def __del__(self) -> None:
            freed.note()

    class Fault(Exception):
        def __del__(self) -> None:
            freed.note()

    return SimpleNamespace(Stream=Stream, Fault=Fault, number=3)


@pytest.mark.usefixtures("small_heap")
def test_an_object_is_freed_once_by_the_one_thread_that_does_it() -> None:
    freed = Freed()
    module = binding(freed)
    for _ in range(2):
        iroh.install_free_thread(module)
    dropped = module.Stream()
    gone = weakref.ref(dropped)
    del dropped
    assert freed.told.wait(DEADLINE_S)
    while gone() is not None:
        threading.Event().wait(0.01)
    gc.collect()
    assert freed.by == [iroh.NAME]


@pytest.mark.usefixtures("small_heap")
def test_an_object_in_a_circle_is_freed_by_that_thread_too() -> None:
    freed = Freed()
    module = binding(freed)
    iroh.install_free_thread(module)
    dropped = module.Stream()
    dropped.itself = dropped
    del dropped
    gc.collect()
    assert freed.told.wait(DEADLINE_S)
    assert freed.by == [iroh.NAME]


def test_an_error_goes_where_it_is_dropped() -> None:
    freed = Freed()
    module = binding(freed)
    iroh.install_free_thread(module)
    module.Fault("gone")
    assert freed.by == [threading.current_thread().name]


def test_a_binding_that_changed_is_not_patched_blindly() -> None:
    with pytest.raises(AttributeError, match=r"iroh\.py"):
        iroh.install_free_thread(SimpleNamespace())


async def test_a_connection_that_ended_goes_at_once_and_waits_for_no_collector() -> None:
    """Before, the error of its last accept held it in a circle: hours, in a process of many objects."""
    near, far = (
        iroh.IrohTransport(SecretKey.generate(), host="127.0.0.1", port=0, alpns=[b"x"])
        for _ in range(2)
    )
    gc.disable()
    try:
        async with asyncio.timeout(DEADLINE_S):
            await near.start()
            await far.start()
            dialled, accepted = await asyncio.gather(
                near.connect(far.node_id, far.addresses(), b"x", deadline=DEADLINE_S), far.accept()
            )
            waiting = asyncio.create_task(ended(accepted))
            gone = weakref.ref(accepted)
            del accepted
            await asyncio.sleep(0)
            await dialled.close("over")
            await waiting
            del waiting
            await until(lambda: gone() is None)
    finally:
        gc.enable()
        await near.close()
        await far.close()


async def ended(connection: iroh.IrohConnection) -> None:
    """Wait until a connection takes no more streams."""
    with suppress(TransportError):
        await connection.accept_stream()
