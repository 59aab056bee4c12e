# SPDX-License-Identifier: Apache-2.0
"""Sums of masked updates at the host: a device that masks wrongly spoils no model unseen."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest

from millpond.aggregate.exact import scale_of
from millpond.aggregate.masking import fixed_point, keys
from millpond.aggregate.masking.member import CohortMember, dealing, dealt_of
from millpond.aggregate.masking.messages import (
    NO_CERTIFICATE,
    Agree,
    Offered,
    OffersTaken,
    OpenCohort,
    ShowShares,
    TakeOffers,
    TakeShares,
)
from millpond.aggregate.masking.roster import CohortRoster
from millpond.aggregate.masking.stream import MaskedVector, mask_stream
from millpond.aggregate.messages import NodeReady, SetPeers, StartNode
from millpond.aggregate.node import ReductionNode
from millpond.base.errors import MillpondError
from millpond.host.jobs.training.reduction import UpdateReduction
from millpond.host.workers.masked_reduction import MaskedReduction, WrongMasks
from millpond.host.workers.node_reduction import NodeReduction
from millpond.host.workers.worker import DeviceWorker, ModelState
from millpond.linux import memory
from millpond.wire.channel import Channel

SIZE, SAMPLES, CLIP = 64, 8, 1.0


@dataclass
class Device:
    """A device that answers as an agent does, for an update of ones; ``spoil`` changes what it has masked."""

    name: str
    bits: int
    spoil: np.ndarray[Any, Any] | None = None
    secret: bytes = field(default_factory=lambda: os.urandom(32))

    def __post_init__(self) -> None:
        self.cohort_key = keys.LastingKey(self.secret).public
        self.cohort_certificate = NO_CERTIFICATE
        self.member = CohortMember(self.name, self.secret, CohortRoster(2), os.urandom, set[bytes]().add)

    def ask(self, request: Any, _deadline: object) -> None:
        self.asked = request

    def answer(self, _reply: type, _deadline: object) -> Any:
        member = self.member
        steps = {
            OpenCohort: member.open,
            TakeOffers: member.take,
            ShowShares: member.show,
            TakeShares: member.take_shown,
            Agree: member.agree,
        }
        return cast(Any, steps.get(type(self.asked), member.unmask))(self.asked)

    def fetch(self, _stop: int, _deadline: object) -> None:
        scale, terms = self.member.rounding
        words = MaskedVector(SIZE, self.bits)
        values = np.full(SIZE, CLIP * SAMPLES / np.sqrt(SIZE), np.float32)  # its norm is the clip
        quantiser = fixed_point.Quantiser(self.bits, scale, 1.0, float(values.max()), terms)
        quantiser.write(values, words.values)
        stream = mask_stream(self.member.masks(b"update"))
        stream.add(words.figures)
        stream.add(words.values)
        if self.spoil is not None:
            words.values += self.spoil
        self.words, self.next = words, 0

    def read(self, out: np.ndarray[Any, Any], _deadline: object) -> None:
        out[:] = self.words.data.view(np.float32)[self.next : self.next + len(out)]
        self.next += len(out)

    def close(self) -> None:
        raise AssertionError


class NodeDevice(Device):
    """A device with a reduction node, which reads what the device has masked."""

    def __init__(self, name: str, bits: int, world: dict[str, NodeDevice]) -> None:
        super().__init__(name, bits)
        self.world, self.fetched, self.offered, self.spread = world, 0, 1, None
        self.memory = np.zeros(MaskedVector.bytes_of(SIZE, 64) // 4, np.float32)
        update, state = self.memory, np.zeros(SIZE, np.float32)
        self.reduction = ReductionNode(name, update, state, self.dial, lambda number: number == self.offered)
        self.node = self

    def dial(self, name: str) -> Channel:
        ours, theirs = socket.socketpair()

        def serve() -> None:
            with Channel(theirs, "a parent") as channel, contextlib.suppress(MillpondError, OSError):
                self.world[name].reduction.serve(channel)

        threading.Thread(target=serve, daemon=True).start()
        return Channel(ours, name)

    def mask(self) -> None:
        super().fetch(0, None)
        self.memory.view(np.uint8)[: self.words.data.nbytes] = self.words.data

    def fetch(self, _stop: int, _deadline: object) -> None:
        self.fetched, self.next = self.fetched + 1, 0

    def start(self, _request: StartNode, _deadline: object) -> NodeReady:
        return NodeReady("127.0.0.1", 40000, True)

    def allow(self, _peers: SetPeers, _deadline: object) -> None:
        pass

    def connect(self, _deadline: object) -> Channel:
        return self.dial(self.name)


@pytest.mark.parametrize("shape", ["star", "tree", "ring"])
def test_devices_add_masked_updates_and_where_one_fails_the_host_does(shape: str) -> None:
    """The state is spread by the nodes, too. The bits are those of the host's sums, in either width."""
    devices = dict[str, NodeDevice]()
    devices |= {name: NodeDevice(name, 64, devices) for name in ("csd0", "csd1", "csd2", "csd3")}
    workers, log = cast(Mapping[str, DeviceWorker], devices), logging.Logger("nodes")
    written = io.StringIO()
    log.addHandler(logging.StreamHandler(written))
    nodes, mean = NodeReduction("csd0", shape, log), np.empty(SIZE, np.float32)
    reduction, state = MaskedReduction(mean, CLIP, nodes=nodes), ModelState(made_state())
    for exchange, bits in enumerate((64, 32, 32), 1):
        nodes.spread(state, list(workers.values()))
        assert all(device.spread for device in devices.values())
        scale = scale_of(CLIP * SAMPLES, 4, fixed_point.bits_of_sum(bits))
        assert reduction.begin(workers, scale, bits) == ({}, "")
        for device in devices.values():
            device.bits, device.offered = bits, exchange
            device.mask()
        devices["csd3"].offered = exchange if exchange < 3 else 0
        assert not reduction.read(workers, exchange)
        assert not reduction.finish(workers, 4 * SAMPLES)[0]
        np.testing.assert_allclose(mean, CLIP / np.sqrt(SIZE), rtol=1e-6)
        assert [device.fetched for device in devices.values()] == [int(exchange == 3)] * 4
    warning = written.getvalue().splitlines()[-1]
    assert "csd3 has no update of exchange 3" in warning and "the host adds the updates" in warning
    nodes.close()


def made_state() -> memory.SharedSlice:
    return memory.map_first(memory.make("state"), 4 * SIZE).part(0, 4 * SIZE)


def test_sums_are_as_narrow_as_their_error_allows() -> None:
    """The mean of 36 devices is off by less than 3e-8 with 32 bits if the clip is 0.5, and not if it is 4."""
    for clip, bits in ((0.5, 32), (4.0, 64)):
        reduction = UpdateReduction(np.empty(1, np.float32), clip, bits="auto")
        reduction.begin(1, np.empty(1, np.float32))
        reduction.expect([40] * 36)
        assert reduction.bits == bits
        assert 36 / reduction.unit / 2 / (36 * 40) <= 2**-25


def mean_of(bits: int, spoil: np.ndarray[Any, Any] | None, noise: float = 0.0) -> np.ndarray[Any, Any]:
    """Return the mean of three devices' updates, of which one is spoilt."""
    devices = {name: Device(name, bits) for name in ("csd0", "csd1", "csd2")}
    devices["csd1"].spoil = spoil
    workers = cast(Mapping[str, DeviceWorker], devices)
    mean = np.empty(SIZE, np.float32)
    reduction = MaskedReduction(mean, CLIP, noise)
    scale = scale_of(CLIP * SAMPLES, 3, fixed_point.bits_of_sum(bits))
    assert reduction.begin(workers, scale, bits) == ({}, "")
    assert not reduction.read(workers, 1)
    assert not reduction.finish(workers, 3 * SAMPLES)[0]
    return mean


@pytest.mark.parametrize("bits", [64, 32])
def test_a_sum_beyond_the_clip_is_none(bits: int) -> None:
    """Wrong masks cannot be told from right ones. What is left of them after all others are removed can."""
    kind = np.uint32 if bits == 32 else np.uint64
    random = np.frombuffer(os.urandom(SIZE * bits // 8), kind)
    large = np.full(SIZE, 1 << (bits - 4), kind)
    for spoil in (random, large):
        with pytest.raises(WrongMasks, match=r"csd0, csd1, csd2 is beyond limits\.clip"):
            mean_of(bits, spoil)
    np.testing.assert_allclose(mean_of(bits, None), CLIP / np.sqrt(SIZE), rtol=1e-4)


def test_a_sum_with_noise_may_be_beyond_the_clip_by_the_noise() -> None:
    noise, scale = 2.0 * CLIP * SAMPLES, scale_of(CLIP * SAMPLES, 3, fixed_point.bits_of_sum(64))
    drawn = np.random.default_rng(1).normal(0.0, noise, SIZE)
    spoil = np.rint(drawn * scale).astype(np.int64).view(np.uint64)
    assert np.linalg.norm(mean_of(64, spoil, noise)) > CLIP
    for junk in (3 * spoil.view(np.int64)).view(np.uint64), np.frombuffer(os.urandom(SIZE * 8), np.uint64):
        with pytest.raises(WrongMasks):
            mean_of(64, junk, noise)


class Liar(Device):
    """A device whose ``lie`` changes its messages; it signs them."""

    lie: str = ""

    def answer(self, reply: type, deadline: object) -> Any:
        found, key = super().answer(reply, deadline), self.member._key
        if isinstance(found, Offered) and self.lie == "shares":
            found = replace(found, digests=dict.fromkeys(found.digests, (bytes(32), bytes(32))))
            session = self.asked.session
            signatures = {
                name: key.sign(dealing(session, self.name, name, dealt_of(found, name)))
                for name in found.sealed
            }
            found = self.member._exchange.made = replace(found, signatures=signatures)  # type: ignore[union-attr]
        if isinstance(found, OffersTaken) and isinstance(self.asked, TakeOffers) and self.lie == "complaint":
            self.member._exchange.shares.clear()  # type: ignore[union-attr]
            session = self.member._exchange.session  # type: ignore[union-attr]
            found = OffersTaken(
                {
                    name: key.sign(keys.digest("complaint", dealing(session, name, self.name, dealt)))
                    for name, dealt in self.asked.offers.items()
                }
            )
        return found


@pytest.mark.parametrize("lie", ["shares", "complaint"])
def test_a_device_that_lies_about_shares_is_out_alone_or_nobody_is(lie: str) -> None:
    devices: dict[str, Device] = {name: Device(name, 64) for name in ("csd0", "csd2", "csd3")}
    devices["csd1"] = liar = Liar("csd1", 64)
    liar.lie = lie
    workers = cast(Mapping[str, DeviceWorker], devices)
    mean = np.empty(SIZE, np.float32)
    reduction = MaskedReduction(mean, CLIP)
    scale = scale_of(CLIP * SAMPLES, 4, fixed_point.bits_of_sum(64))
    lost, why = reduction.begin(workers, scale, 64)
    if lie == "shares":
        assert lost.keys() == {"csd1"} and lost["csd1"][1] and why == "shares of masks are wrong"
        return
    assert (lost, why) == ({}, "")
    assert not reduction.read(workers, 1)
    assert not reduction.finish(workers, 4 * SAMPLES)[0]
    np.testing.assert_allclose(mean, CLIP / np.sqrt(SIZE), rtol=1e-4)
