"""Malformed and hostile calls, drawn by hypothesis: bytes, mutated messages, odd values, odd headers, bad manners."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import grpc
from hypothesis import strategies as st

from rollout.v1 import debug_pb2
from rollout.v1 import rollout_pb2 as pb

SERVICE = "/rollout.v1.RolloutService/"
METHODS = ("Generate", "Score", "UpdateWeights", "GetServerInfo", "Abort", "Pause", "Resume")
Manner = Literal["read", "cancel", "deadline", "dangle"]
CALL_S = 20.0
ODD_PATHS = (
    "/", "//", "/x", SERVICE, SERVICE + "Nope", SERVICE + "generate", "/" + "m" * 3000,
    "/rollout.v1.DebugService/Trace", "/grpc.health.v1.Health/Check",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostileCall:
    """One call, whoever it comes from."""

    method: str
    """full path"""
    messages: tuple[bytes, ...]
    headers: tuple[tuple[str, str], ...]
    manner: Manner
    """read to the end; cancel after the first answer; a deadline of milliseconds; never half-close, then cancel"""
    gzip: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended."""

    code: grpc.StatusCode
    details: str
    retry: bool
    """whether RetryInfo came along"""


RARELY = st.sampled_from([False] * 19 + [True])
NASTY_INTS = (0, 1, -1, 2, 63, 64, 95, 96, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
NASTY_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-6, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = st.one_of(
    st.sampled_from(
        ["", "a", "\x00", "..", "../../etc/passwd", "%s%n", "{0}", "$(id)", "ü" * 200, "x" * 5000, "\u202e"]
    ),
    st.text(max_size=20),
)
INT64 = st.one_of(st.sampled_from(NASTY_INTS), st.integers(-(2**63), 2**63 - 1))
INT32 = st.one_of(st.sampled_from([i for i in NASTY_INTS if abs(i) <= 2**31 - 1]), st.integers(-(2**31), 2**31 - 1))
FLOATS = st.one_of(st.sampled_from(NASTY_FLOATS), st.floats())
IDS = st.one_of(
    st.lists(st.integers(2, 60), min_size=1, max_size=8),
    st.lists(INT64, max_size=8),
    st.sampled_from([[5] * 95, [5] * 96, [5] * 5000]),
)


def _fields(kind: type[Any], **drawn: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Messages with any part of the fields set."""
    return st.fixed_dictionaries({}, optional=drawn).map(lambda given: kind(**given))


SAMPLING = _fields(
    pb.SamplingParams,
    temperature=FLOATS, top_k=INT32, top_p=FLOATS, min_p=FLOATS, seed=INT64, max_tokens=st.one_of(st.just(4), INT32),
    stop_token_ids=st.lists(INT64, max_size=4), stop=st.lists(TEXTS, max_size=3), ignore_eos=st.booleans(),
    barred_token_ids=st.lists(INT64, max_size=4), bar_undefined_tokens=st.booleans(), include_stop=st.booleans(),
)  # fmt: skip
TOKENS = IDS.map(lambda ids: pb.TokenIds(ids=ids))
SMALL = st.one_of(st.sampled_from([1, 2, 16]), INT32)
GENERATE = _fields(
    pb.GenerateRequest,
    request_id=TEXTS, tokens=TOKENS, sampling=SAMPLING, n=SMALL, sample_index=SMALL, row_digests=st.booleans(),
    priority=SMALL, top_logprobs=SMALL, prompt_logprobs=st.booleans(),
)  # fmt: skip
SCORE = _fields(
    pb.ScoreRequest,
    request_id=TEXTS, temperature=FLOATS, row_digests=st.booleans(), top_logprobs=SMALL, priority=SMALL,
    sequences=st.lists(_fields(pb.ScoreSequence, tokens=TOKENS, start=SMALL), max_size=4),
)  # fmt: skip
BEGIN = _fields(
    pb.BeginUpdate,
    version=INT64,
    digest=st.one_of(TEXTS, st.just("ab" * 32)),
    num_tensors=INT32,
    policy=st.integers(0, 9),
).map(lambda begin: pb.UpdateWeightsRequest(begin=begin))
CHUNK = _fields(
    pb.TensorChunk,
    name=st.one_of(st.sampled_from(["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"]), TEXTS),
    dtype=st.integers(0, 9), shape=st.lists(st.one_of(st.just(64), INT64), max_size=4), offset=INT64,
    data=st.binary(max_size=300),
)  # fmt: skip
BUCKET = st.lists(CHUNK, max_size=4).map(lambda chunks: pb.UpdateWeightsRequest(bucket=pb.TensorBucket(chunks=chunks)))
GOOD = pb.GenerateRequest(
    request_id="r", tokens=pb.TokenIds(ids=[3, 4, 5]), sampling=pb.SamplingParams(seed=1, max_tokens=4), n=2
)
SINGLE: dict[str, st.SearchStrategy[Any]] = {
    "Generate": st.one_of(GENERATE, st.just(GOOD)),
    "Score": SCORE,
    "GetServerInfo": _fields(pb.GetServerInfoRequest, tensor_digests=st.booleans()),
    "Abort": _fields(pb.AbortRequest, request_id=TEXTS, all=st.booleans()),
    "Pause": st.just(pb.PauseRequest()),
    "Resume": st.just(pb.ResumeRequest()),
}


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes of a message with up to four faults."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "repeat", "long"]))
        if kind == "flip" and data:
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at]
        elif kind == "insert":
            data = data[:at] + draw(st.binary(max_size=12)) + data[at:]
        elif kind == "repeat":
            data = data + data[at:]
        else:
            data = data[:at] + b"\xff" * 9 + b"\x7f" + data[at:]
    return data


@st.composite
def payloads(draw: st.DrawFn, method: str) -> tuple[bytes, ...]:
    """The messages of one call."""
    if draw(RARELY):
        return tuple(draw(st.lists(st.binary(max_size=200), max_size=3)))
    if method == "UpdateWeights":
        made = [draw(BEGIN), *draw(st.lists(st.one_of(BUCKET, BEGIN), max_size=3))]
    else:
        made = [draw(SINGLE[method])]
    data = [message.SerializeToString() for message in made]
    if draw(st.booleans()):
        at = draw(st.integers(0, len(data) - 1))
        data[at] = draw(mutated(data[at]))
    return tuple(data)


def headers(tokens: dict[str, str]) -> st.SearchStrategy[tuple[tuple[str, str], ...]]:
    """Mostly a good token of the role control; else one that is missing, wrong, doubled or of the wrong role."""
    good = (("authorization", f"Bearer {tokens['control']}"),)
    word = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=40)
    bad = st.one_of(
        st.just(()),
        st.just((*good, *good)),
        st.just((("authorization", f"Bearer {tokens['generate']}"),)),
        st.just((("authorization", f"Basic {tokens['control']}"),)),
        word.map(lambda text: (("authorization", f"Bearer {text}"),)),
    )
    odd = st.one_of(
        word.map(lambda text: (*good, ("x-client-id", text))),
        word.map(lambda text: (*good, ("x-request-id", text))),
        st.binary(max_size=60).map(lambda data: (*good, ("x-odd-bin", data))),
        st.just((*good, ("traceparent", "00-zz-zz-zz"))),
        st.just((*good, ("x-long", "y" * 6000))),
    )
    return st.one_of(st.just(good), st.just(good), st.just(good), bad, odd)  # type: ignore[arg-type]


@st.composite
def hostile_calls(draw: st.DrawFn, tokens: dict[str, str]) -> HostileCall:
    """Any of them."""
    method = draw(st.sampled_from(METHODS))
    path = SERVICE + method
    messages = draw(payloads(method))
    if draw(RARELY):
        path = draw(st.sampled_from(ODD_PATHS))
        messages = (debug_pb2.TraceRequest().SerializeToString(), *messages)
    manner: Manner = draw(st.sampled_from(["read", "read", "read", "read", "cancel", "deadline", "dangle"]))
    return HostileCall(path, messages, draw(headers(tokens)), manner, draw(RARELY))


def play(channel: grpc.Channel, call: HostileCall) -> Outcome:
    """Make the call and say how it ended. Every method is spoken to as a stream: on the wire there is no difference."""
    left = threading.Event()

    def messages() -> Iterator[bytes]:
        yield from call.messages
        if call.manner == "dangle":
            left.wait(CALL_S)

    live = channel.stream_stream(call.method)(
        messages(),
        metadata=call.headers,
        timeout=0.01 if call.manner == "deadline" else 0.1 if call.manner == "dangle" else CALL_S,
        compression=grpc.Compression.Gzip if call.gzip else None,
    )
    try:
        for _ in live:
            if call.manner == "cancel":
                live.cancel()
        code, details = grpc.StatusCode.OK, ""
    except grpc.RpcError:
        code, details = live.code(), live.details() or ""
    finally:
        left.set()
    trailers = dict(live.trailing_metadata() or ())
    return Outcome(code, details, b"RetryInfo" in bytes(trailers.get("grpc-status-details-bin", b"")))


def knock(address: str, data: bytes) -> None:
    """Bytes that are no HTTP/2, or the start of one, straight to the port."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as plug:
        plug.sendall(data)
        plug.settimeout(0.05)
        try:
            while plug.recv(4096):
                pass
        except OSError:
            pass


KNOCKS = st.one_of(
    st.binary(max_size=64),
    st.binary(max_size=64).map(lambda data: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + data),
    st.just(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    st.just(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
)
