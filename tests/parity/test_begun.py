"""A sample that was begun elsewhere goes on behind its last delivered token as if it had never stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.errors import InvalidRequest
from rollout.spans import BegunSample
from rollout.types import FinishReason, VersionSpan
from tests.engines import Generated, build_engine, drain, isolated, random_prompt, run, sample, shared_model

LENGTH = 40
"""Tokens; across page edges (16) and chunk edges (24)."""
KINDS: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_k": 5}, {"temperature": 0.0}, {"top_p": 0.6}]


def begun(whole: Generated, count: int, version: int = 0) -> BegunSample:
    return BegunSample(tuple(whole.token_ids[:count]), (VersionSpan(version, 0, count),) if count else ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_rest_has_the_same_bits_from_any_token(tiny_qwen3_path: Path, dtype: torch.dtype, kind: Any) -> None:
    """All cuts at once, in one engine, beside each other."""
    model = shared_model(tiny_qwen3_path, dtype)
    request = sample(random_prompt(13, 5), index=2, max_tokens=LENGTH, **kind)
    whole = isolated(model, request)
    engine = build_engine(model)
    parts = [replace(request, sample_id=f"s{k}", begun=begun(whole, k)) for k in range(LENGTH)]
    for part in parts:
        engine.add(engine.effective_request(part))
    seen: dict[str, list[int]] = {}
    rests: dict[str, Generated] = {part.sample_id: Generated() for part in parts}
    with model.kernels.invariant_mode():
        while engine.live_ids:
            for event in engine.step():
                one, chunk = rests[event.sample_id], event.chunk  # type: ignore[union-attr]
                if chunk is not None:
                    seen.setdefault(event.sample_id, []).append(chunk.offset)
                    one.token_ids += chunk.token_ids.tolist()
                    one.policy += list(chunk.policy_logprobs)
                    one.behavior += list(chunk.behavior_logprobs)
                    one.digests += list(chunk.row_digests)
                one.summary = event.summary or one.summary  # type: ignore[union-attr]
    for k, part in enumerate(parts):
        rest = rests[part.sample_id]
        assert seen[part.sample_id] == list(range(k, LENGTH))
        calm = Generated(whole.token_ids[k:], whole.policy[k:], whole.behavior[k:], whole.digests[k:])
        assert rest.bits() == calm.bits(), f"behind token {k}"
        assert rest.summary is not None and rest.summary.num_tokens == LENGTH
        assert rest.summary.spans == (VersionSpan(0, 0, LENGTH),)
    # Control: another beginning, another rest.
    other = begun(whole, 20)
    strange = replace(request, begun=replace(other, token_ids=(*other.token_ids[:-1], (other.token_ids[-1] + 1) % 60)))
    rest = Generated()
    engine.add(engine.effective_request(strange))
    with model.kernels.invariant_mode():
        while engine.live_ids:
            for event in engine.step():
                rest.policy += list(event.chunk.policy_logprobs)  # type: ignore[union-attr]
    assert rest.policy != whole.policy[20:]
    assert engine.pages.num_free == engine.pages.num_pages


def test_it_goes_on_under_newer_weights_with_its_spans(tiny_qwen3_path: Path) -> None:
    model = shared_model(tiny_qwen3_path, torch.float32)
    request = sample(random_prompt(5, 1), max_tokens=12)
    whole = isolated(model, request)
    engine = build_engine(model, version=7)
    engine.add(engine.effective_request(replace(request, begun=begun(whole, 5, version=3))))
    with model.kernels.invariant_mode():
        events = [event for _ in range(20) for event in engine.step()]
    assert events[-1].summary.spans == (VersionSpan(3, 0, 5), VersionSpan(7, 5, 12))  # type: ignore[union-attr]


@pytest.mark.parametrize("by", ["length", "a stop id"])
def test_a_whole_sample_gets_its_end_and_nothing_is_computed(tiny_qwen3_path: Path, by: str) -> None:
    """The stream broke between the last token and the end: the same end comes, with no token drawn or lost."""
    model = shared_model(tiny_qwen3_path, torch.float32)
    request = sample(random_prompt(5, 1), max_tokens=6)
    if by == "a stop id":
        stop = (isolated(model, request).token_ids[3],)
        request = replace(request, sampling=replace(request.sampling, stop_token_ids=stop))
    whole = isolated(model, request)
    count = len(whole.token_ids)
    assert (count < 6) is (by == "a stop id"), "control: it ends where it should"
    engine = build_engine(model)
    event = engine.add(engine.effective_request(replace(request, begun=begun(whole, count))))
    assert event is not None and event.chunk is None and event.summary is not None
    calm = whole.summary
    assert calm is not None
    assert (event.summary.finish, event.summary.num_tokens, event.summary.text) == (
        calm.finish,
        calm.num_tokens,
        calm.text,
    )
    assert not engine.live_ids and engine.pages.num_free == engine.pages.num_pages
    with pytest.raises(InvalidRequest, match="ask Score"):
        engine.add(engine.effective_request(replace(request, begun=begun(whole, count), prompt_logprobs=True)))
    # Control: one token less is drawn again.
    if count > 1:
        assert engine.add(engine.effective_request(replace(request, begun=begun(whole, count - 1)))) is None


def test_beginnings_that_cannot_be(tiny_qwen3_path: Path) -> None:
    model = shared_model(tiny_qwen3_path, torch.float32)
    engine = build_engine(model)
    request = sample(random_prompt(5, 1), max_tokens=4)
    whole = run(engine, [request])[request.sample_id]
    with pytest.raises(InvalidRequest, match="has 5 tokens and may have 4"):
        longer = begun(whole, 4)
        longer = BegunSample((*longer.token_ids, 3), (VersionSpan(0, 0, 5),))
        engine.effective_request(replace(request, begun=longer))
    with pytest.raises(InvalidRequest, match=r"resume\.tokens\[0\] = 64"):
        engine.effective_request(replace(request, begun=BegunSample((64,), (VersionSpan(0, 0, 1),))))
    stop = replace(request.sampling, stop_token_ids=(whole.token_ids[1],))
    with pytest.raises(InvalidRequest, match=r"resume\.tokens\[1\].*ended"):
        engine.add(engine.effective_request(replace(request, sampling=stop, begun=begun(whole, 3))))
    assert not engine.live_ids
    # The budget counts what was begun (G1): two tokens more, not four.
    engine.add(engine.effective_request(replace(request, begun=begun(whole, 2))))
    with model.kernels.invariant_mode():
        (*_, last) = [event for _ in range(9) for event in engine.step()]
    assert (last.summary.num_tokens, last.summary.finish.reason) == (4, FinishReason.LENGTH)  # type: ignore[union-attr]
    drain(engine)
