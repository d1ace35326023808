"""AIConfigurator's measurements of served models beside what the iteration model predicts."""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

from infra.hardware import hardware
from infra.models import MODELS, model_of
from infra.performance.anchor_table import Anchor
from infra.performance.iteration import BF16, FP8, IterationModel
from infra.performance.parallel import Parallel
from infra.performance.steady import Load, under_concurrency

SYSTEMS = {"h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "a100_sxm": "a100", "l40s": "l40s"}


def silicon_rows(path: Path) -> list[Anchor]:
    """Rows of AIConfigurator's `silicon_refs.csv` whose model, system and precision the models know.

    Those served from one kind of worker; with an expert size of 0 or 1 experts are split by tensor.
    """
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    return list(_silicon(rows))


def _silicon(rows: Iterable[dict[str, str]]) -> Iterator[Anchor]:
    for row in rows:
        model = plain_model(row["model_path"])
        device = SYSTEMS.get(row["system"])
        if row["mode"] != "agg" or model not in MODELS or device is None:
            continue
        tensor, expert = int(row["tp_size"]), int(row["moe_ep_size"] or 1) or 1
        fp8 = "fp8" in (row["gemm_quant_mode"], row["precision"])
        parallel = Parallel(tensor, expert=expert if tensor % expert == 0 else 1)
        precision = FP8 if fp8 else BF16
        engine = IterationModel(model_of(model), hardware(device), parallel, precision=precision)
        load = Load(int(row["isl"]), int(row["osl"]))
        state = under_concurrency(engine, load, int(row["batch_size"]))
        where = f"{model}{' FP8' if fp8 else ''}, {device.upper()} TP{tensor}, {row['backend']} "
        where += f"{row['backend_version']}, {row['isl']}/{row['osl']}, {row['batch_size']} at a time"
        for what, column, seconds in (
            ("per token", "silicon_tpot_ms", state.token_s),
            ("first token", "silicon_ttft_ms", state.first_token_s),
        ):
            yield Anchor("silicon_refs", f"{where}: {what}", "ms", float(row[column]), seconds * 1e3)


def plain_model(path: str) -> str:
    return path.rsplit("/", 1)[-1].lower().removesuffix("-fp8")
