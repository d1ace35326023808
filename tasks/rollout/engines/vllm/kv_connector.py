"""A KV connector for vLLM: KV of whole cache blocks as files in a folder. Runs in the vLLM environment.

A request names a folder in its `kv_transfer_params`: `{"save": folder}` writes the KV of its prompt there, a
file a tensor-parallel rank, and its answer says of how many tokens (`{"saved": tokens}`); `{"load": folder,
"tokens": tokens}` takes the KV of so many first tokens of its prompt from there. The engine service moves the
files between machines and removes them when the weights change.

vLLM's own file connector finds KV by token ids alone: after an update it would give KV of the old weights.
Blocks are copied as they lie, whatever the attention kernel's layout within them: both sides run the same
build.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.logger import init_logger

logger = init_logger(__name__)  # below vLLM's own logger, which is the configured one


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """KV between a folder and the cache: blocks `first` and on of the prompt are `blocks` of the cache."""

    folder: str
    first: int
    blocks: list[int]


@dataclass(slots=True)
class StepCopies(KVConnectorMetadata):
    """What the workers do in one engine step: loads before the model runs, saves after it."""

    loads: list[BlockCopy] = field(default_factory=list)
    saves: list[BlockCopy] = field(default_factory=list)


@dataclass(slots=True)
class _Saving:
    folder: str
    tokens: int  # of the prompt
    blocks: list[int]


class FolderConnector(KVConnectorBase_V1):
    """Half of it lives in the scheduler, which decides; half in each worker, which copies."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._matched: dict[
            str, tuple[str, int]
        ] = {}  # folder and first block, by request that asked to load
        self._loading: dict[str, BlockCopy] = {}
        self._loaded: set[str] = set()  # requests; one that starts again finds other weights, and computes
        self._saving: dict[str, _Saving] = {}
        self._layers: dict[str, torch.Tensor] = {}
        self._failed_blocks: set[int] = set()

    # Scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        asked = request.kv_transfer_params or {}
        folder = asked.get("load")
        if folder is None or request.request_id in self._loaded or not os.path.isdir(folder):
            return 0, False
        # The last token is computed here, for its logits.
        most = self._whole(min(asked["tokens"], len(request.prompt_token_ids) - 1))
        if most <= num_computed_tokens:
            return 0, False
        self._matched[request.request_id] = folder, num_computed_tokens // self._block_tokens
        return most - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        matched = self._matched.pop(request.request_id, None)
        if matched is not None and num_external_tokens > 0:
            folder, first = matched
            ids = blocks.get_block_ids()[0][first : first + num_external_tokens // self._block_tokens]
            self._loading[request.request_id] = BlockCopy(folder, first, ids)
            self._loaded.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> StepCopies:
        copies = StepCopies(loads=list(self._loading.values()))
        self._loading.clear()
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            folder = _asked(new.sampling_params).get("save")
            if folder is not None:
                self._saving[new.req_id] = _Saving(folder, len(new.prompt_token_ids), list(new.block_ids[0]))
                self._save_when_computed(new.req_id, new.num_computed_tokens + scheduled[new.req_id], copies)
        again = scheduler_output.scheduled_cached_reqs
        for index, name in enumerate(again.req_ids):
            saving = self._saving.get(name)
            if saving is None:
                continue
            blocks = list((again.new_block_ids[index] or ([],))[0])
            saving.blocks = blocks if name in again.resumed_req_ids else saving.blocks + blocks
            self._save_when_computed(name, again.num_computed_tokens[index] + scheduled[name], copies)
        return copies

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._loaded.discard(request.request_id)
        self._matched.pop(request.request_id, None)
        self._saving.pop(request.request_id, None)
        if "save" not in (request.kv_transfer_params or {}):
            return False, None
        return False, {"saved": self._whole(len(request.prompt_token_ids))}

    def _save_when_computed(self, name: str, computed: int, copies: StepCopies) -> None:
        saving = self._saving[name]
        if computed >= saving.tokens:
            whole = self._whole(saving.tokens) // self._block_tokens
            if whole:
                copies.saves.append(BlockCopy(saving.folder, 0, saving.blocks[:whole]))

    def _whole(self, tokens: int) -> int:
        return tokens // self._block_tokens * self._block_tokens

    # Workers

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        for copy in self._copies.loads:
            try:
                saved = load_file(_file(copy.folder))
                for name, kept in saved.items():
                    cache = forward_context.no_compile_layers[name].kv_cache
                    wanted = kept[copy.first : copy.first + len(copy.blocks)]
                    cache[torch.tensor(copy.blocks, device=cache.device)] = wanted.to(cache.device)
            except (OSError, SafetensorError, KeyError, RuntimeError) as error:
                # vLLM computes these blocks itself (its `kv_load_failure_policy`).
                logger.warning("KV in %s is computed here: %s", copy.folder, error)
                self._failed_blocks.update(copy.blocks)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before the model runs."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        if self._copies.saves:
            self._layers[layer_name] = kv_layer

    def wait_for_save(self) -> None:
        """The step's blocks are still the request's: it is freed after the step."""
        for copy in self._copies.saves:
            rows = torch.tensor(copy.blocks)
            layers = {name: layer[rows.to(layer.device)].cpu() for name, layer in self._layers.items()}
            target = Path(_file(copy.folder))
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_suffix(".part")
            save_file(layers, part)
            part.rename(target)
        self._layers.clear()

    @property
    def _copies(self) -> StepCopies:
        copies = self._get_connector_metadata()
        assert isinstance(copies, StepCopies)
        return copies


def _asked(sampling_params: Any) -> dict[str, Any]:
    asked: dict[str, Any] = ((sampling_params and sampling_params.extra_args) or {}).get(
        "kv_transfer_params"
    ) or {}
    return asked


def _file(folder: str) -> str:
    return os.path.join(folder, f"rank-{get_tensor_model_parallel_rank()}.safetensors")
