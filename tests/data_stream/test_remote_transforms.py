# SPDX-License-Identifier: Apache-2.0
"""Transforms in another process: what the service refuses to believe of it, and what a fault of it costs."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import millpond.data
from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, MillpondError, Refused
from millpond.data.streaming import connection
from millpond.data.streaming.protocol.messages import OpenData
from millpond.data.streaming.served_set import ReadSamples, ServedSet, Transform, TransformerLost, open_set
from millpond.data.streaming.server import OpenSets
from millpond.data.streaming.transforms import process, remote
from millpond.data.streaming.transforms.functions import in_process
from millpond.data.streaming.transforms.messages import ApplyTransform, TransformedSamples
from millpond.data.streaming.transforms.process import Chunks, serve
from millpond.data.streaming.transforms.remote import RemoteTransforms
from millpond.train.data.columns import pack, unpack
from millpond.wire.channel import Channel
from millpond.wire.framing import Limits, encode
from millpond.wire.messages import Ok

from .served import SAMPLES, double, service

ALL = list(range(SAMPLES))
Body = Callable[[Channel], None]


def honest(channel: Channel) -> None:
    """What the process does, with the transform of these tests."""
    serve(channel, Chunks({"double": double, "fails": fails}).answer)


def fails(sample: tuple[Any, Any]) -> tuple[Any, Any]:
    if int(sample[1]) == 57:
        raise OSError("broken data stream")
    return sample


Applying = Callable[..., tuple[RemoteTransforms, "Processes"]]


@pytest.fixture
def applying() -> Iterator[Applying]:
    """Makes transforms by processes of these bodies."""
    with contextlib.ExitStack() as stack:

        def make(*bodies: Body, seconds: float = 20.0) -> tuple[RemoteTransforms, Processes]:
            processes = Processes(*bodies)
            transforms = RemoteTransforms(processes.restart, seconds)
            stack.enter_context(contextlib.closing(transforms))
            return transforms, processes

        yield make


class Processes:
    """Threads in the place of the processes: one for each body, honest ones after these."""

    def __init__(self, *bodies: Body) -> None:
        self.bodies, self.started, self.numbers = list(bodies), 0, list[int]()

    def restart(self, number: int) -> tuple[str, socket.socket | None]:
        body = self.bodies.pop(0) if self.bodies else honest
        ours, theirs = socket.socketpair()
        self.started += 1
        self.numbers.append(number)
        threading.Thread(target=self._run, args=(body, theirs), daemon=True).start()
        return "Segmentation fault" if self.started > 1 else "", ours

    def _run(self, body: Body, sock: socket.socket) -> None:
        with Channel(sock, "the service", limits=Limits(1 << 22, 1 << 30)) as channel:
            body(channel)


def answering(answer: TransformedSamples, payload: bytes) -> Body:
    """A process that knows each transform, and answers all samples alike."""

    def run(channel: Channel) -> None:
        while True:
            try:
                head = channel.receive(Deadline.after(20))
                channel.receive_payload(1 << 30, Deadline.after(20))
                asked = head.message
                assert isinstance(asked, ApplyTransform)
                if not len(unpack(asked.head, memoryview(bytearray(head.payload_size)))):
                    empty = pack(())
                    channel.send(TransformedSamples(empty.head, 0), Deadline.after(20))
                elif asked.last:
                    channel.send(answer, Deadline.after(20), payload)
                else:
                    channel.send(Ok(), Deadline.after(20))
            except MillpondError:
                return

    return run


def labels(stream: Any) -> list[int]:
    return sorted(label for _, batch in stream for label in batch.tolist())


def chunk(count: int) -> ReadSamples:
    return ReadSamples(samples(count), count)


def samples(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.full((2, 3), float(label)), torch.tensor(label)) for label in range(count)]


@pytest.mark.parametrize("shape", [(3, 8, 8), (8, 8)])
def test_images_are_the_same_as_in_the_services_process(
    tmp_path: Path, shape: tuple[int, ...], applying: Applying
) -> None:
    """They cross as they are stored, and are scaled where the function runs."""
    pixels = np.random.default_rng(0).integers(0, 256, (70, *shape), np.uint8)
    (tmp_path / "images").mkdir()
    np.save(tmp_path / "images" / "images.npy", pixels)
    np.save(tmp_path / "images" / "labels.npy", np.arange(70))
    transforms, _ = applying()
    own, other = in_process({"double": double})("double"), transforms("double")
    wanted = np.arange(69, -1, -1)
    found = [open_set(tmp_path / "images", "worker", each).read(wanted) for each in (own, other)]
    assert found[0].head == found[1].head
    assert bytearray().join(found[0].pieces) == bytearray().join(found[1].pieces)


GOOD = pack([double(each) for each in samples(5)])
FEWER = pack([double(each) for each in samples(4)])
BODY = bytearray().join(GOOD.pieces)
REFUSED = "sent an invalid answer: Segmentation fault"


@pytest.mark.parametrize("count", [1, 5, remote.PART, remote.PART + 1, 3 * remote.PART])
def test_samples_come_back_as_the_function_leaves_them(count: int, applying: Applying) -> None:
    transform = applying()[0]("double")
    found = transform(chunk(count))
    (part,) = unpack(found.head, found.pieces[0]).parts
    images, labels = part.batch(0, count)
    assert labels.tolist() == list(range(count))
    assert torch.equal(images, 2 * torch.stack([image for image, _ in samples(count)]))
    assert found.size == len(found.pieces[0])


@pytest.mark.parametrize(
    ("answer", "payload"),
    [
        (TransformedSamples(FEWER.head, FEWER.size), bytearray().join(FEWER.pieces)),
        (TransformedSamples(GOOD.head, len(BODY) - 64), BODY[:-64]),
        (TransformedSamples(GOOD.head.replace(b"float32", b"complex"), len(BODY)), BODY),
        (TransformedSamples(b"\xc1", 0), b""),
        (TransformedSamples(pack(samples(1)).head.replace(b"\x01", b"\xff"), 0), b""),
    ],
    ids=["fewer samples", "a shape beyond the bytes", "no type", "no head", "no count"],
)
def test_what_is_no_answer_is_not_sent_on(
    answer: TransformedSamples, payload: bytes, applying: Applying
) -> None:
    transforms, processes = applying(answering(answer, bytes(payload)))
    transform = transforms("double")
    with pytest.raises(TransformerLost, match=REFUSED):
        transform(chunk(5))
    assert transform(chunk(5)).head == GOOD.head and processes.started == 2


def test_no_memory_is_taken_for_more_than_a_chunk(applying: Applying) -> None:
    def boasts(channel: Channel) -> None:
        channel.receive(Deadline.after(20))
        channel.sock.sendall(encode(TransformedSamples(GOOD.head, 1 << 40), 1 << 40))

    with pytest.raises(TransformerLost, match=REFUSED):
        applying(boasts)[0]("double")


def test_a_chunk_that_has_become_too_large_is_read_in_halves(
    folder: Path, monkeypatch: pytest.MonkeyPatch, applying: Applying
) -> None:
    for module in (process, remote, connection):
        monkeypatch.setattr(module, "LARGEST_CHUNK", 4000)  # some 15 samples
    transforms, _ = applying()
    too_large = transforms("double")(chunk(300))
    assert too_large.pieces == () and too_large.size > 4000
    with service(folder, transforms=transforms) as where:
        assert labels(millpond.data.stream(f"{where}/images", batch=40, transform="double")) == ALL


def test_a_process_that_hangs_or_dies_costs_its_stream_alone(folder: Path, applying: Applying) -> None:
    """A stream without transforms goes on meanwhile, and the next one with a transform has a new process."""
    go_on = threading.Event()

    def hangs(channel: Channel) -> None:
        serve(channel, Chunks({"double": lambda sample: double(sample) if go_on.wait(20) else None}).answer)

    transforms, _ = applying(hangs, lambda channel: channel.close(), seconds=0.5)
    with service(folder, transforms=transforms) as where:
        other = iter(millpond.data.stream(f"{where}/images", batch=8, memory=2000))
        found = next(other)[1].tolist()
        for told in (
            r"the transform 'double' hangs: it took more than 0\.5 s for 32 samples: Segmentation fault",
            "the process of the transform 'double' has ended: Segmentation fault",
        ):
            with pytest.raises(Refused, match=told):
                list(millpond.data.stream(f"{where}/images", batch=8, transform="double", patience=2.0))
        go_on.set()
        found += [label for _, batch in other for label in batch.tolist()]
        assert sorted(found) == ALL
        assert labels(millpond.data.stream(f"{where}/images", batch=8, transform="double")) == ALL


def test_an_error_of_the_function_names_its_sample(folder: Path, applying: Applying) -> None:
    transforms, processes = applying()
    with service(folder, transforms=transforms) as where:
        with pytest.raises(Refused, match="sample 57: the transform of a sample failed: OSError"):
            list(millpond.data.stream(f"{where}/images", batch=8, transform="fails", patience=2.0))
        with pytest.raises(Refused, match="the data service has no transform 'missing'"):
            list(millpond.data.stream(f"{where}/images", batch=8, transform="missing", patience=2.0))
    assert len(set(processes.numbers)) == processes.started  # none was replaced


def test_chunks_that_are_read_at_the_same_time_have_a_process_each(applying: Applying) -> None:
    both = threading.Barrier(2, timeout=20)

    def meets(sample: Any) -> Any:
        both.wait()
        return sample

    def body(channel: Channel) -> None:
        serve(channel, Chunks({"meets": meets}).answer)

    transforms, processes = applying(body, body)
    transform = transforms("meets")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(transform, [chunk(1)] * 2))
    assert found[0].head == found[1].head and processes.started == 2


def test_a_set_that_is_slow_to_open_holds_up_no_other_set(folder: Path, applying: Applying) -> None:
    transforms, begun, go_on = applying()[0], threading.Event(), threading.Event()

    def named(name: str) -> Transform:
        if name == "slow":
            begun.set()
            go_on.wait(20)
        return transforms("double")

    def read(where: str, name: str) -> list[int]:
        return labels(millpond.data.stream(f"{where}/images", batch=8, transform=name))

    with service(folder, transforms=named) as where, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(read, where, "slow")
        begun.wait(20)
        assert read(where, "double") == ALL and not slow.done()
        go_on.set()
        assert slow.result() == ALL


def test_those_who_ask_for_a_set_meanwhile_get_the_same_one() -> None:
    sets, key, asked = OpenSets(1, "readers"), OpenData("images"), list[Future[ServedSet]]()

    def made() -> ServedSet:
        asked.extend(pool.submit(sets.opened, key, fails_to_open) for _ in range(3))
        return ServedSet((), 0, "", lambda _indices: pack(()))

    def fails_to_open() -> ServedSet:
        raise OSError("a second time")

    with ThreadPoolExecutor(3) as pool:
        with pytest.raises(OSError, match="a second time"):
            sets.opened(key, fails_to_open)
        found = sets.opened(key, made)  # a failure is not kept
        assert [each.result() for each in asked] == [found] * 3
    sets.pool.shutdown()


def test_without_a_process_there_is_no_transform() -> None:
    transforms = RemoteTransforms(lambda _number: ("no memory", None))
    with pytest.raises(LocalError, match="no transform can be applied: no memory"):
        transforms("double")
