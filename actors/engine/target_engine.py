"""The target: a step plan in, accepted lengths, next tokens and features out."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.core.layout import StepPlan, StepResult
from actors.core.lockstep import StepLayout
from actors.engine.base import TargetSpec
from actors.engine.checkpoint import ModelConfig, find_model, model_config
from actors.engine.expert_group import ExpertGroup
from actors.engine.feed_forward import sharding_of
from actors.engine.grammars import GrammarDesk, tokenizer_file
from actors.engine.graphs import CudaGraphRecorder
from actors.engine.packed_linear import BlockLinear, linear_for
from actors.engine.paged_step import PagedForward
from actors.engine.rebalance import Rebalancer
from actors.engine.row_invariance import rows_are_invariant
from actors.engine.special_rows import SpecialStep
from actors.engine.target_model import StepInputs, TargetModel
from actors.engine.weights import Checkpoint, CheckpointError, telling_bytes
from configs.schema import ClusterConfig
from kernels import dispatch
from kernels.kv_store import KvStore
from kernels.ragged_attention import Tiling, attention_layout, ragged_rows
from kernels.rejection import verify, verify_batch
from kernels.row_mirror import RowMirrors

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchTargetEngine:
    """A model with its paged K/V. Implements `TargetEngine`.

    Args:
        model: weights and forward.
        store: K/V, owned by this engine.
        spec: facts; `tap_layer_ids` are the layers whose outputs become features.
        grammars: what requests with a grammar need; None refuses them.
        captures: replay steps of rounds from CUDA graphs, where there is CUDA.
    """

    def __init__(
        self,
        model: TargetModel,
        store: KvStore,
        spec: TargetSpec,
        grammars: GrammarDesk | None = None,
        *,
        captures: bool = True,
    ) -> None:
        self.model, self.store, self.spec = model, store, spec
        self.grammars, self.captures = grammars, captures
        self.paged: PagedForward | None = None
        if dispatch.implementation("attend_paged", model.device.type) == "triton":
            # A captured step cannot hold a group's collectives: their splits are known only when it runs.
            self.paged = PagedForward(
                model,
                store,
                spec.tap_layer_ids,
                spec.max_model_len,
                CudaGraphRecorder() if captures and model.sharding is None else None,
            )
        self.mirrors: dict[int, RowMirrors] = {}  # by window
        if self.paged is None and model.device.type == "cpu":
            self.mirrors = {window: RowMirrors(store) for window in set(model.config.windows)}
        self.tiling = Tiling.of(model.dtype, reproducible=spec.numerics == "reproducible")

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """See `TargetEngine.step`."""
        shared_s = self._shared_s()
        hidden, taps = self._forward(plan)
        decided = verify_batch(plan, self.model.device)
        logprobs, errors = {}, {}
        if len(decided.token_rows):
            logits = self.model.logits(hidden.index_select(0, decided.token_rows))
            special = SpecialStep(plan, logits, self.grammars) if plan.special else None
            num_accepted, next_token = verify(special.shape() if special else logits, decided)
            accepted, following = (
                t.to(torch.int32).cpu().numpy() for t in (num_accepted, next_token)
            )
            if special:
                logprobs, errors = special.logprobs(accepted, following), special.errors
        else:
            accepted = np.zeros(plan.num_requests, np.int32)
            following = np.full(plan.num_requests, -1, np.int32)
        features = None if taps is None else as_numpy(taps)
        if shared_s is not None:
            shared_s = self.group.shared_s - shared_s
        return StepResult(accepted, following, features, logprobs, errors, shared_s)

    @torch.inference_mode()
    def all_logits(self, plan: StepPlan) -> Tensor:
        """Logits of every token of the step [B, vocab_size], K/V written: for comparing, not for serving."""
        return self.model.logits(self._forward(plan)[0])

    def check_row_invariance(self) -> bool:
        """See `TargetEngine.check_row_invariance`. Uses K/V of its own; takes seconds on a CPU."""
        return rows_are_invariant(self)

    def sibling(self, num_blocks: int) -> TorchTargetEngine:
        """The same model and numerics over `num_blocks` K/V blocks of its own."""
        return TorchTargetEngine(
            self.model,
            self.model.new_store(num_blocks, self.store.block_size),
            self.spec,
            captures=self.captures,
        )

    @property
    def group(self) -> ExpertGroup:
        """The ranks that share this one's experts."""
        assert self.model.sharding is not None, "this rank is in no group"
        return self.model.sharding.group

    @property
    def num_uncaptured(self) -> int:
        """Steps that a GPU could have replayed from a graph, were it not for a group or a failed capture."""
        return self.paged.num_uncaptured if self.paged else 0

    @torch.inference_mode()
    def join(self, *, is_leaving: bool = False) -> StepLayout:
        """The part of this rank in a step of its group for which it has no token itself.

        Returns what the group agreed on; where it `runs`, the others' tokens have been served. Raises CollectiveError
        and LockstepError, after which the group must be formed anew.
        """
        layout = self.group.agree(0, is_leaving=is_leaving)
        if layout.runs:
            self.model.join()
        return layout

    def _shared_s(self) -> float | None:
        """Seconds in what the group does together so far; None where there is no group, or its work is a GPU's."""
        is_told = self.model.sharding is not None and self.model.device.type == "cpu"
        return self.group.shared_s if is_told else None

    def _forward(self, plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        if self.model.sharding is not None:
            self.group.agree(plan.batch_tokens)
        if self.paged is not None:
            return self.paged(plan)
        inputs = self.inputs(plan)
        hidden, taps = self.model.forward(inputs, self.store, self.spec.tap_layer_ids)
        inputs.done()
        num = plan.batch_tokens
        return hidden[:num], None if taps is None else taps[:num]

    def inputs(self, plan: StepPlan) -> StepInputs:
        """The plan on the device, with its attention laid out."""
        device = self.model.device
        token_ids, positions, slots = plan.token_ids, plan.positions, plan.slot_mapping
        cu_query_len = plan.cu_query_len
        if plan.batch_tokens < self.model.min_rows:
            # A lone token is computed twice, as two queries of its row that are the same token.
            repeats = self.model.min_rows
            token_ids, positions, slots = (
                np.repeat(a, repeats) for a in (token_ids, positions, slots)
            )
            cu_query_len = np.array([0, repeats], np.int32)
        rows = ragged_rows(
            cu_query_len, positions, plan.context_len, plan.block_tables, plan.request_ids
        )
        config = self.model.config
        heads_per_kv, like = config.num_heads // config.num_kv_heads, self.model.embedding
        layouts = {
            window: attention_layout(
                rows, self.store, heads_per_kv, self.tiling, like, window, self.mirrors.get(window)
            )
            for window in set(config.windows)
        }
        ids, places, targets = (
            torch.from_numpy(a.astype(np.int64)).to(device) for a in (token_ids, positions, slots)
        )
        return StepInputs(ids, places, targets, layouts)


def as_numpy(features: Tensor) -> npt.NDArray[np.uint16] | npt.NDArray[np.float32]:
    """bf16 as its bits in uint16, fp32 as it is."""
    if features.dtype == torch.bfloat16:
        bits: npt.NDArray[np.uint16] = features.view(torch.int16).cpu().numpy().view(np.uint16)
        return bits
    values: npt.NDArray[np.float32] = features.float().cpu().numpy()
    return values


def load_engine(
    config: ClusterConfig,
    tap_layer_ids: tuple[int, ...] = (),
    *,
    progress: bool = True,
    captures: bool = True,
    group: ExpertGroup | None = None,
) -> TorchTargetEngine:
    """Load the target of a cluster; the calling thread's torch thread count is taken as it is.

    Args:
        tap_layer_ids: 0-based layers whose outputs the drafter wants.
        progress: show a bar when the bundled model is converted for the first time.
        captures: see `TorchTargetEngine`.
        group: this rank's place among those that share the feed-forwards; None: it holds all of them.

    Raises CheckpointError (UnsupportedModelError) naming the field or tensor that does not fit.
    """
    model_dir = find_model(config.model.path, progress=progress)
    facts = model_config(model_dir)
    _check_fit(facts, config, tap_layer_ids)
    device = torch.device(config.model.device)
    tensors = Checkpoint(model_dir)
    model = TargetModel(
        facts,
        tensors,
        DTYPES[config.model.dtype],
        device,
        config.model.numerics,
        config.model.max_model_len,
        sharding_of(facts, group, config.target.dispatch),
    )
    if group is not None and facts.moe is not None:
        Rebalancer(model, tensors, config.target.rebalance_steps, config.target.redundant_experts)
    num_blocks = config.target.kv_cache_tokens // config.target.block_size
    spec = TargetSpec(
        name=config.model.name,
        architecture=facts.architecture,
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        max_model_len=config.model.max_model_len,
        eos_token_ids=facts.eos_token_ids,
        tap_layer_ids=tuple(tap_layer_ids),
        dtype=config.model.dtype,
        device=config.model.device,
        numerics=config.model.numerics,
        num_blocks=num_blocks,
        block_size=config.target.block_size,
        identity=identity(model_dir, config),
    )
    store = model.new_store(num_blocks, spec.block_size)
    grammars = GrammarDesk(
        tokenizer_file(config.model.path, model_dir), facts.vocab_size, facts.eos_token_ids
    )
    engine = TorchTargetEngine(model, store, spec, grammars, captures=captures)
    _say_how_it_computes(engine)
    return engine


def _say_how_it_computes(engine: TorchTargetEngine) -> None:
    log.info("%s", dispatch.describe(engine.spec.device))
    if engine.model.sharding is not None and engine.paged is not None and engine.captures:
        log.warning("steps of a group hold collectives and are not captured: all run uncaptured")


def _check_fit(facts: ModelConfig, config: ClusterConfig, tap_layer_ids: tuple[int, ...]) -> None:
    if config.model.max_model_len > facts.max_position:
        raise CheckpointError(
            f"model.max_model_len={config.model.max_model_len} is beyond the {facts.max_position} positions of "
            f"{config.model.path}; lower it"
        )
    target = config.target
    if facts.moe is None and target.group_size > 1 and target.rebalance_steps:
        raise CheckpointError(
            f"target.rebalance_steps={target.rebalance_steps}: {config.model.path} has no experts to move, its ranks "
            "share a dense feed-forward evenly; set it to 0"
        )
    beyond = [i for i in tap_layer_ids if not 0 <= i < facts.num_layers]
    if beyond:
        raise CheckpointError(
            f"the drafter taps layers {beyond}, {config.model.path} has {facts.num_layers}; "
            "use a drafter made for this model"
        )


def identity(model_dir: Path, config: ClusterConfig) -> str:
    """A hash of what step times depend on: weights, dtype, device, numerics, block size, group, threads."""
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    for part in telling_bytes(model_dir):
        digest.update(part)
    name = torch.cuda.get_device_name() if config.model.device == "cuda" else "cpu"
    target = config.target
    facts: tuple[object, ...] = (config.model.dtype, name, config.model.numerics, target.block_size)
    if target.group_size > 1:
        facts += (target.group_size, target.dispatch, "loaded alike")
    device, dtype = torch.device(config.model.device), DTYPES[config.model.dtype]
    if linear_for(device, dtype, config.model.numerics) is BlockLinear:
        facts += ("in blocks",)
    digest.update(f"{facts} {torch.get_num_threads()}".encode())
    return digest.hexdigest()[:16]
