"""The memory for keys and values is a bound: rows, kept prompts and turns, and copies of factors stay below it together."""

from functools import cache

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from base_model.adapter import Adapter
from base_model.decoder import Decoder
from base_model.stacked import FusedAdapter, fuse
from common.wire.messages import TurnRequest
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.batch import RunningRows
from rollout_service.embedded.pools import EngineLimits
from rollout_service.embedded.row_states import TurnRow
from tests.support.kv_bytes import KvBytes
from tests.support.rollout_cases import adapter_of, exact_limits, ref, request
from tests.support.trainer_cases import load_shallow

KV_BYTES = 9 << 19
RANKS = (8, 8, 8, 8, 8, 8, 8, 8, 16, 16, 16, 16)
Answers = dict[str, tuple[list[int], list[float]]]


@cache
def base() -> Decoder:
    return load_shallow()


def model(*, exact: bool = False) -> FusedDecoder:
    return FusedDecoder(base(), exact=exact)


def adapters() -> list[FusedAdapter]:
    return [fused_of(adapter_of(number, rank=rank)) for number, rank in enumerate(RANKS)]


def fused_of(whole: Adapter) -> FusedAdapter:
    """The part of an adapter that is for the layers of `base`."""
    shapes = base().linear_shapes()
    a, b = ({name: factors[name] for name in shapes} for factors in (whole.a, whole.b))
    return fuse(Adapter(whole.spec, a, b), shapes, base().config.num_layers, like=base().embedding)


def asked(sample: int, turn: int, tokens: list[int]) -> TurnRequest:
    """A turn of one of RANKS' jobs; answers of all lengths, so that rows are in pools of all lengths."""
    job = sample % len(RANKS)
    limit = (4, 20, 60, 150, 300)[sample % 5]
    return request(ref(f"job{job}"), tokens=tokens, group=sample, turn=turn, name=f"{sample}/{turn}", max_tokens=limit)


def sample_all(limits: EngineLimits, *, num: int = 16, turns: int = 2, longest: int = 400) -> tuple[Answers, int]:
    """Samples all turns of `num` trajectories; says the most bytes on the way. Prompts have 2 to `longest` tokens, some are shared."""
    rng, fused, answers = np.random.default_rng(0), adapters(), Answers()
    batch = RunningRows(model(exact=limits.exact), end_ids=range(97, 103), decode=lambda _: "", limits=limits)
    prompts = [rng.integers(97, 122, 2 + longest * (i // 2 * 7 % 24) // 24).tolist() for i in range(num)]
    with torch.inference_mode(), KvBytes(base().config) as measured:
        for sample, tokens in enumerate(prompts):
            batch.add(TurnRow(asked(sample, 0, tokens), fused[sample % len(RANKS)], handle=(sample, 0, tokens)))
        while batch.has_work:
            for end in batch.advance():
                sample, turn, tokens = end.row.handle
                answers[end.row.request.id] = (end.partial.tokens, end.partial.logprobs)
                if turn + 1 < turns:
                    more = [*tokens, *end.partial.tokens, *range(97, 100 + sample)]
                    handle = (sample, turn + 1, more)
                    batch.add(TurnRow(asked(sample, turn + 1, more), end.row.adapter, handle=handle))
    return answers, measured.peak


def test_all_keys_values_and_copies_of_factors_stay_below_the_limit() -> None:
    answers, peak = sample_all(EngineLimits(kv_bytes=KV_BYTES), num=12)
    assert len(answers) == 12 * 2
    assert KV_BYTES / 2 < peak <= KV_BYTES


def test_a_chat_goes_before_turns_that_wait_for_memory_and_behind_earlier_chats() -> None:
    batch = RunningRows(model(), end_ids=(), decode=lambda _: "", limits=EngineLimits(slots=1))
    for number, chat in enumerate((False, False, True, True)):
        turn = replace(request(name=str(number), max_tokens=2), chat=chat)
        batch.add(TurnRow(turn, None, handle=None))
    ends = list[str]()
    with torch.inference_mode():
        while batch.has_work:
            ends += [end.row.request.id for end in batch.advance()]
    assert ends == ["2", "3", "0", "1"]


def test_a_chat_gets_its_first_token_before_a_step_of_all_and_chats_in_a_row_hold_nobody_up() -> None:
    batch = RunningRows(model(), end_ids=(), decode=lambda _: "", limits=EngineLimits())
    bulk = TurnRow(request(name="bulk", max_tokens=40), None, handle=None)

    def ask(number: int) -> None:
        turn = replace(request(name=f"chat {number}", max_tokens=1), chat=True)
        batch.add(TurnRow(turn, None, handle=None))

    with torch.inference_mode():
        batch.add(bulk)
        batch.advance()
        counts = [1]
        for number in range(6):
            ask(number)
            assert [end.row.request.id for end in batch.advance()] == [f"chat {number}"]
            counts += [progress.num_sampled for progress in (batch.progress(bulk),) if progress]
    assert counts == [1, 1, 2, 2, 3, 3, 4]


def test_rows_under_way_go_on_between_the_prompts_of_those_that_join_and_tenants_join_in_turn() -> None:
    batch = RunningRows(model(), end_ids=(), decode=lambda _: "", limits=EngineLimits())
    under_way = TurnRow(request(name="under way", max_tokens=20), None, handle=None)
    seen = list[int]()  # tokens of it, whenever a row with a long prompt ended

    def ask(name: str, tenant: str, tokens: list[int]) -> None:
        turn = replace(request(name=name, tokens=tokens, max_tokens=1), tenant=tenant)
        batch.add(TurnRow(turn, None, handle=None))

    ends = list[str]()
    with torch.inference_mode():
        batch.add(under_way)
        batch.advance()
        for number in range(8):
            ask(f"long {number}", "flood", [97 + number] * 1100)
        ask("short", "neighbour", [97, 98])
        while batch.has_work:
            for end in batch.advance():
                ends.append(end.row.request.id)
                if progress := batch.progress(under_way):
                    seen.append(progress.num_sampled)
    assert sorted(ends[:3]) == ["long 0", "long 1", "short"] and ends[-1] == "under way"
    assert sorted({*seen[:-1]}) == [2, 3, 4, 5]


@pytest.mark.exact
def test_little_memory_changes_no_bit(min_rows: int) -> None:
    little, _ = sample_all(exact_limits(min_rows, kv_bytes=KV_BYTES), turns=1)
    much, wanted = sample_all(exact_limits(min_rows), turns=1)
    assert little == much and wanted > KV_BYTES


def test_a_row_of_a_huge_adapter_leaves_no_numbers_on_which_a_neighbours_query_could_overflow() -> None:
    batch = RunningRows(model(), end_ids=(), decode=lambda _: "", limits=EngineLimits(kv_bytes=KV_BYTES))
    huge = fused_of(adapter_of(1, size=1e9))
    with torch.inference_mode():
        batch.add(TurnRow(request(ref("huge"), tokens=[97, 98], max_tokens=2), huge, handle="huge"))
        batch.add(TurnRow(request(ref("beside"), tokens=[97, 98], max_tokens=4), None, handle="beside"))
        ends = [end for _ in range(4) for end in batch.advance()]
    assert [(end.row.handle, end.stop_reason) for end in ends] == [("huge", "length"), ("beside", "length")]
    left = [float(layer.abs().max()) for pool in batch._pools for layer in pool.layers]  # pyright: ignore[reportPrivateUsage]
    assert 0 < max(left) < 1e3
