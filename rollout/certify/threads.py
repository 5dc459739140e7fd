"""Family: thread counts: the number of CPU threads must not change a bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from rollout.certify.linear import shapes
from rollout.certify.steps import training_logits
from rollout.certify.subject import Family, Outcome, Subject, compare
from rollout.images import ImageInput
from rollout.kernels.probe import cancelling_product
from rollout.multimodal import VisionPart, images_of


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch's thread number inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(subject: Subject, count: int) -> dict[str, torch.Tensor]:
    with torch_threads(count), subject.kernels.invariant_mode():
        results: dict[str, torch.Tensor] = {}
        for outer, inner in shapes(subject):
            product = cancelling_product(33, inner, outer, subject.spec.dtype, subject.seed)
            x, weight = (part.to(subject.kernels.device) for part in product)
            results[f"{outer}x{inner}"] = torch.nn.functional.linear(x, weight)
        wide = subject.wide(40, subject.spec.vocab_size * 3)
        results["sum to one element"] = wide.sum()[None]
        results["mean to one element"] = wide.mean(-1)[None]
        results["log_softmax of one row"] = torch.log_softmax(wide, -1)
        ids = subject.token_ids(41, min(subject.kernels.page_size + 3, subject.spec.context_length))
        results["whole model"] = training_logits(subject, [ids])[0]
        if subject.model.vision is not None:
            results["features of an image"] = subject.model.vision.encode(_image(subject, subject.model.vision)).embeds
    return results


def _image(subject: Subject, part: VisionPart) -> ImageInput:
    """Random pixels, 12 x 8 features."""
    grid = 1, 12 * part.rules.merge, 8 * part.rules.merge
    pixels = subject.wide(42, grid[1] * grid[2], part.rules.patch_values)
    return images_of(pixels, torch.tensor([grid]))[0]


@torch.no_grad()
def _checks(subject: Subject) -> Iterator[Outcome]:
    one = _run(subject, 1)
    for count in subject.threads:
        if count == 1:
            # Serving with one thread needs no other count: that the same run repeats is what is left to show.
            yield from (compare(f"{name}, again with 1 thread", t, one[name]) for name, t in _run(subject, 1).items())
            continue
        for name, tensor in _run(subject, count).items():
            yield compare(f"{name}, {count} threads", tensor, one[name])


@torch.no_grad()
def _control(subject: Subject) -> Outcome:
    """One sum in as many parts as there are threads, as aten reduces to a single element outside invariant mode."""
    wide = subject.wide(40, subject.spec.vocab_size * 3)
    sums = [torch.stack([part.sum() for part in wide.tensor_split(n)]).sum() for n in range(1, 9)]
    return compare("one sum in 1 to 8 parts", torch.stack(sums), sums[0].expand(len(sums)).contiguous())


FAMILY = Family("threads", "numbers of CPU threads", _checks, _control)
