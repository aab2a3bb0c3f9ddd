"""The ring client of stage 0: answers, their order, and that no caller waits for ever."""

import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace

import pytest
from support.ring_cases import MemoryPort, pair

from primerl.node.errors import EngineError
from primerl.node.pipeline.frames import Frame, Kind
from primerl.node.pipeline.micro_batches import MicroBatches, RingClient
from primerl.node.pipeline.ports import Port, PortClosed

WAIT_S = 60.0
Change = Callable[[Frame], Frame | None]


class Far:
    """All other stages: answers as `change` says, by default as they should."""

    def __init__(self) -> None:
        self.seen: list[Frame] = []
        self.change: Change = lambda frame: frame
        self.ports: list[MemoryPort] = []
        self.near: list[MemoryPort] = []
        self.refuses = False

    def connect(self) -> Port:
        if self.refuses:
            raise PortClosed("nobody listens")
        near, far = pair()
        self.ports.append(far)
        self.near.append(near)
        threading.Thread(target=self._answer, args=(far,), daemon=True).start()
        return near

    def tell(self, frame: Frame) -> None:
        self.ports[-1].send(frame)

    def _answer(self, port: MemoryPort) -> None:
        try:
            while True:
                frame = port.receive()
                self.seen.append(frame)
                if frame.kind is Kind.STEP:
                    frame = replace(frame, kind=Kind.DRAWN)
                if (answer := self.change(frame)) is not None:
                    port.send(answer)
        except PortClosed:
            pass


@pytest.fixture
def far() -> Far:
    return Far()


@pytest.fixture
def chain(far: Far) -> Generator[RingClient]:
    found = RingClient(far.connect, MicroBatches(4), stall_s=0.5)
    yield found
    found.close()


def send(chain: RingClient, far: Far) -> Frame | None:
    frame, answer = chain.submit(b"step", 2)
    if frame is not None:
        far.near[-1].send(replace(frame, trail=b"trail"))
    return answer.result(WAIT_S)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_before_the_first_chain_nothing_is_sent(chain: RingClient, far: Far) -> None:
    chain.open()
    assert not chain.healthy
    assert send(chain, far) is None
    assert far.seen == []


def test_a_chain_begins_with_everybody_on_the_version_of_stage_0(
    chain: RingClient, far: Far
) -> None:
    chain.begin(3, 17, WAIT_S)
    assert [(one.kind, one.epoch, one.number) for one in far.seen] == [
        (Kind.RESET, 3, 0),
        (Kind.SWITCH, 3, 17),
    ]
    assert chain.healthy
    found = send(chain, far)
    assert found is not None
    assert (found.kind, found.body, found.number) == (Kind.DRAWN, b"step", 0)
    assert far.seen[-1].trail == b"trail"


def test_numbers_begin_anew_with_every_chain(chain: RingClient, far: Far) -> None:
    for epoch in (1, 2):
        chain.begin(epoch, 0, WAIT_S)
        for number in range(2):
            found = send(chain, far)
            assert found is not None
            assert (found.epoch, found.number) == (epoch, number)
    with pytest.raises(EngineError, match="is over"):
        chain.begin(2, 0, WAIT_S)


def test_a_fault_answers_everything_that_is_in_flight(chain: RingClient, far: Far) -> None:
    chain.begin(1, 0, WAIT_S)
    far.change = lambda frame: None
    futures = [chain.submit(b"", 1)[1] for _ in range(3)]
    assert chain.lanes(8) == 2
    assert chain.lane_stats == (2, 3, 0.0)
    far.tell(Frame(Kind.FAULT, 1, 2, b"no memory"))
    assert [one.result(WAIT_S) for one in futures] == [None] * 3
    assert chain.fault == "stage 2: no memory"
    assert send(chain, far) is None
    far.change = lambda frame: frame
    chain.begin(2, 0, WAIT_S)
    assert send(chain, far) is not None


def test_what_is_of_another_chain_is_dropped(chain: RingClient, far: Far) -> None:
    chain.begin(5, 0, WAIT_S)
    far.tell(Frame(Kind.FAULT, 4, 1, b"long ago"))
    far.tell(Frame(Kind.DRAWN, 4, 0))
    far.tell(Frame(Kind.DRAWN, 6, 0))
    assert send(chain, far) is not None
    assert chain.healthy


@pytest.mark.parametrize("number", [1, 7])
def test_an_answer_out_of_turn_breaks_the_chain_and_is_reported(
    chain: RingClient, far: Far, number: int
) -> None:
    chain.begin(1, 0, WAIT_S)
    far.change = lambda frame: replace(frame, number=number)
    assert send(chain, far) is None
    assert "out of order" in chain.fault
    until(lambda: far.seen[-1].kind is Kind.FAULT)


def test_an_answer_to_nothing_breaks_the_chain(chain: RingClient, far: Far) -> None:
    chain.begin(1, 0, WAIT_S)
    far.tell(Frame(Kind.DRAWN, 1, 0))
    until(lambda: not chain.healthy)


def test_a_ring_on_which_nothing_comes_round_is_no_chain(chain: RingClient, far: Far) -> None:
    far.change = lambda frame: None
    with pytest.raises(EngineError, match="did not return"):
        chain.begin(1, 0, 0.1)
    far.change = lambda frame: frame
    chain.begin(2, 0, WAIT_S)
    assert chain.healthy


def test_a_stage_without_the_version_says_so(chain: RingClient, far: Far) -> None:
    def fail(frame: Frame) -> Frame:
        if frame.kind is Kind.SWITCH:
            return Frame(Kind.FAULT, frame.epoch, 1, b"policy 9 is not here")
        return frame

    far.change = fail
    with pytest.raises(EngineError, match="policy 9 is not here"):
        chain.begin(1, 9, WAIT_S)


def test_a_switch_is_waited_for(chain: RingClient, far: Far) -> None:
    chain.begin(1, 0, WAIT_S)
    assert chain.switch(1)(WAIT_S)
    far.change = lambda frame: None
    assert not chain.switch(2)(0.05)
    assert not chain.healthy
    assert not chain.switch(3)(WAIT_S)  # nobody is asked, nobody is waited for


def test_a_micro_batch_that_never_comes_back_is_given_up(chain: RingClient, far: Far) -> None:
    chain.begin(1, 0, WAIT_S)
    far.change = lambda frame: None
    assert send(chain, far) is None
    assert "did not return" in chain.fault


def test_a_node_that_goes_away_is_connected_to_again(chain: RingClient, far: Far) -> None:
    chain.begin(1, 0, WAIT_S)
    far.ports[-1].close()
    until(lambda: not chain.healthy)
    assert send(chain, far) is None
    far.refuses = True
    with pytest.raises(EngineError, match="cannot be reached"):
        chain.begin(2, 0, WAIT_S)
    far.refuses = False
    chain.begin(3, 0, WAIT_S)
    assert send(chain, far) is not None
    assert len(far.ports) == 2


def test_closing_answers_everything(chain: RingClient, far: Far) -> None:
    chain.begin(1, 0, WAIT_S)
    far.change = lambda frame: None
    _, future = chain.submit(b"", 1)
    chain.close()
    assert future.result(WAIT_S) is None
