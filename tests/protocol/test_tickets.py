import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.protocol_cases import (
    NOW,
    OTHER_RUN,
    RUN,
    STRANGER,
    TICKET,
    TRAINER,
    USUAL_TICKET,
    refuses,
)

from primerl.protocol import tickets
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.errors import Reason
from primerl.protocol.manifests import Ticket
from primerl.protocol.tickets import MAX_TICKET_CHARACTERS, PACKED, WHOLE
from primerl.protocol.version import CLOCK_SKEW_S, MAX_ADDRESSES, MAX_NAME

TEXT = tickets.issue(TRAINER, TICKET)
SEALED = seal(TRAINER, Purpose.TICKET, RUN, TICKET, expires=TICKET.expires)
DAMAGE = (
    Reason.MALFORMED,
    Reason.BAD_SIGNATURE,
    Reason.WRONG_PURPOSE,
    Reason.WRONG_VERSION,
    Reason.EXPIRED,
)
"""What a damaged character may be noticed by."""
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


def as_text(sealed: bytes) -> str:
    """Any bytes in the shape of a ticket."""
    return WHOLE + base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()


def with_addresses(**changes: object) -> Ticket:
    return msgspec.structs.replace(TICKET, **changes)


def test_a_ticket_is_read_as_it_was_issued() -> None:
    assert tickets.read(TEXT, now=NOW) == TICKET
    assert tickets.check(tickets.sealed_bytes(TEXT), now=NOW) == TICKET
    assert tickets.sealed_bytes(TEXT) == tickets.sealed_bytes(as_text(SEALED)) == SEALED


def test_a_usual_ticket_fits_into_250_characters() -> None:
    """It is pasted into terminals and chats."""
    text = tickets.issue(TRAINER, USUAL_TICKET)
    assert text.startswith(PACKED)
    assert len(text) <= 250
    assert tickets.read(text, now=NOW) == USUAL_TICKET


@pytest.mark.parametrize(
    "changes",
    [
        {"addresses": ("[2001:db8::1]:1", "192.0.2.1:2")},  # not in the order of a packed one
        {"addresses": ("[2001:DB8::1]:1",)},
        {"addresses": ("[fe80::1%eth0]:1",)},
        {"addresses": ("192.0.2.1:01",)},
        {"issued": NOW + 7200},
    ],
)
def test_a_ticket_that_cannot_be_packed_is_written_whole(changes: dict[str, object]) -> None:
    ticket = with_addresses(**changes)
    text = tickets.issue(TRAINER, ticket)
    assert text.startswith(WHOLE)
    assert tickets.read(text, now=0) == ticket


@given(
    st.lists(st.ip_addresses(v=4) | st.ip_addresses(v=6) | st.text(max_size=9), max_size=6),
    st.integers(0, 2**16 - 1),
    st.text(max_size=64),
    st.binary(max_size=16),
    st.integers(0, 2**53),
)
def test_every_ticket_comes_back_as_it_was_signed(
    hosts: list[object], port: int, label: str, name: bytes, lasts_s: int
) -> None:
    addresses = tuple(f"{host}:{port}" for host in hosts)
    ticket = with_addresses(
        addresses=addresses, discovery=addresses, label=label, id=name, issued=0, expires=lasts_s
    )
    text = tickets.issue(TRAINER, ticket)
    assert tickets.read(text, now=0) == ticket


@pytest.mark.parametrize("space", [" ", "\n", "\r\n", "\t", "\u00a0"])
def test_white_space_in_a_ticket_does_not_count(space: str) -> None:
    """Mail and chats fold it, terminals copy it with line breaks."""
    for text in (TEXT, as_text(SEALED)):
        folded = space.join(text[at : at + 72] for at in range(0, len(text), 72))
        assert tickets.read(space + folded + space, now=NOW) == TICKET
        assert tickets.read(text[:3] + space + text[3:], now=NOW) == TICKET


@pytest.mark.parametrize("inside", ["\0", "=", "%", "\u00e9", "\u200b", ".", "+", "/"])
def test_a_foreign_character_inside_a_ticket_is_refused(inside: str) -> None:
    for at in (4, len(PACKED), len(PACKED) + 1, 100, 101, 102, len(TEXT) - 2):
        with refuses(Reason.MALFORMED):
            tickets.read(TEXT[:at] + inside + TEXT[at:], now=NOW)
        with refuses(Reason.MALFORMED):
            tickets.read(TEXT[:at] + inside + TEXT[at + 1 :], now=NOW)


@pytest.mark.parametrize("padding", [0, 1, 2])
def test_a_ticket_is_refused_with_any_one_character_damaged(padding: int) -> None:
    # Three lengths: each leaves another number of spare bits in the last character.
    text = tickets.issue(TRAINER, with_addresses(addresses=("x" * padding,)))
    assert tickets.read(text, now=NOW).addresses == ("x" * padding,)
    for at in range(len(text)):
        others = [c for c in ALPHABET if c != text[at]]
        for other in others if at >= len(text) - 2 else (others[at % 63], others[(at + 31) % 63]):
            with refuses(*DAMAGE):
                tickets.read(text[:at] + other + text[at + 1 :], now=NOW)


def test_a_ticket_is_refused_with_characters_missing_or_swapped() -> None:
    for at in range(len(TEXT)):
        with refuses(*DAMAGE):
            tickets.read(TEXT[:at], now=NOW)
        with refuses(*DAMAGE):
            tickets.read(TEXT[:at] + TEXT[at + 1 :], now=NOW)
        swapped = TEXT[:at] + TEXT[at : at + 2][::-1] + TEXT[at + 2 :]
        if swapped != TEXT:
            with refuses(*DAMAGE):
                tickets.read(swapped, now=NOW)


@given(st.text(max_size=60))
def test_any_other_text_is_malformed(text: str) -> None:
    with refuses(Reason.MALFORMED):
        tickets.read(text, now=NOW)
    for prefix in (WHOLE, PACKED):
        with refuses(Reason.MALFORMED):
            tickets.read(prefix + text, now=NOW)


@given(st.binary(max_size=300))
def test_any_other_bytes_are_no_ticket(data: bytes) -> None:
    with refuses(Reason.MALFORMED, Reason.WRONG_VERSION):  # a small number may come first
        tickets.read(as_text(data), now=NOW)
    packed = base64.urlsafe_b64encode(bytes(128) + data).rstrip(b"=").decode()
    with refuses(Reason.MALFORMED, Reason.WRONG_VERSION):
        tickets.sealed_bytes(PACKED + packed)


def test_a_packed_ticket_of_another_wire_version_is_named_so() -> None:
    packed = bytes(128) + msgspec.msgpack.encode([3, 0, 0, b"", "", 0, b"", b"", [], 0])
    with refuses(Reason.WRONG_VERSION):
        tickets.sealed_bytes(PACKED + base64.urlsafe_b64encode(packed).rstrip(b"=").decode())


@pytest.mark.parametrize("late", [0, CLOCK_SKEW_S])
def test_a_ticket_lasts_to_its_end_and_the_skew(late: int) -> None:
    assert tickets.read(TEXT, now=TICKET.expires + late) == TICKET


def test_an_expired_ticket_is_refused() -> None:
    with refuses(Reason.EXPIRED):
        tickets.read(TEXT, now=TICKET.expires + CLOCK_SKEW_S + 1)


def test_only_the_trainer_issues_tickets_to_its_run() -> None:
    with refuses(Reason.WRONG_SIGNER):
        tickets.read(tickets.issue(STRANGER, TICKET), now=NOW)


def test_a_ticket_names_the_run_of_its_envelope() -> None:
    sealed = seal(TRAINER, Purpose.TICKET, OTHER_RUN, TICKET, expires=TICKET.expires)
    with refuses(Reason.WRONG_SIGNER):
        tickets.read(as_text(sealed), now=NOW)


def test_what_the_trainer_signed_for_another_purpose_is_no_ticket() -> None:
    sealed = seal(TRAINER, Purpose.PEER, RUN, TICKET, expires=TICKET.expires)
    with refuses(Reason.WRONG_PURPOSE):
        tickets.read(as_text(sealed), now=NOW)


def test_an_oversized_text_is_refused_before_it_is_decoded() -> None:
    with refuses(Reason.MALFORMED):
        tickets.sealed_bytes(WHOLE + "A" * (MAX_TICKET_CHARACTERS + 1 - len(PACKED)))
    longest = WHOLE + "A" * (MAX_TICKET_CHARACTERS - len(PACKED))
    assert len(tickets.sealed_bytes(longest)) == 6137


@pytest.mark.parametrize("name", ["addresses", "discovery"])
def test_a_ticket_names_few_addresses(name: str) -> None:
    most = with_addresses(**{name: ("x",) * MAX_ADDRESSES})
    assert tickets.read(tickets.issue(TRAINER, most), now=NOW) == most
    for wrong in (("x",) * (MAX_ADDRESSES + 1), ("x" * (MAX_NAME + 1),)):
        with refuses(Reason.MALFORMED):
            tickets.read(tickets.issue(TRAINER, with_addresses(**{name: wrong})), now=NOW)
