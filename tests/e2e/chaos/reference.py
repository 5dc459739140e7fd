"""What a calm run would have said: one bare engine a weight set, asked for any stretch of any sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollout.types import GenerateRequest, SampleEvent, SampleRequest, TokenChunk
from tests.services import Bits, bits_of_chunks, make_engine, tiny_settings


class Reference:
    """Engines over two weight sets; version v of a service holds set v % 2."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._engines = [make_engine(tiny_settings(folder)) for folder in folders]
        self._known: dict[tuple[int, str, int], Bits] = {}

    def whole(self, request: GenerateRequest, index: int, version: int) -> Bits:
        """Sample ``index`` of a request under one version, from its first token to its last."""
        key = (version % 2, request.request_id, index)
        if key not in self._known:
            samples = [self._sample(request, i) for i in range(request.n)]
            found = self._run(version, samples)
            self._known |= {(version % 2, request.request_id, i): found[i] for i in range(request.n)}
        return self._known[key]

    def stretch(self, request: GenerateRequest, index: int, before: tuple[int, ...], count: int, version: int) -> Bits:
        """``count`` tokens behind ``before``: given as a longer prompt, which is another path than the service's."""
        sampling = replace(request.sampling, max_tokens=count)
        sample = replace(
            self._sample(request, index), prompt_ids=(*request.prompt_ids, *before), sampling=sampling
        )  # fmt: skip
        return self._run(version, [sample])[index]

    @staticmethod
    def _sample(request: GenerateRequest, index: int) -> SampleRequest:
        return SampleRequest(f"s{index}", request.prompt_ids, request.sampling, index, request.row_digests)

    def _run(self, version: int, samples: list[SampleRequest]) -> dict[int, Bits]:
        engine = self._engines[version % 2]
        for sample in samples:
            engine.add(engine.effective_request(sample))
        chunks: list[TokenChunk] = []
        with engine.model.kernels.invariant_mode():
            while engine.live_ids:
                events = engine.step()
                chunks += [e.chunk for e in events if isinstance(e, SampleEvent) and e.chunk is not None]
        return {b.sample: b for b in bits_of_chunks(chunks)}
