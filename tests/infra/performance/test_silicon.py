from pathlib import Path

import pytest

from infra.performance.silicon import silicon_rows

SILICON = Path(__file__).parents[4] / "shared" / "anchors" / "silicon_refs.csv"


def test_rows_of_unknown_models_systems_and_split_workers_are_left_out(tmp_path):
    head = "mode,model_path,system,tp_size,moe_ep_size,gemm_quant_mode,precision,backend,backend_version,"
    head += "isl,osl,batch_size,silicon_ttft_ms,silicon_tpot_ms"
    lines = [
        head,
        "agg,Qwen/Qwen3-32B,h100_sxm,2,1,,,vllm,0.12,1024,1024,32,236,20",
        "agg,moonshotai/Kimi-K2.5,h100_sxm,2,1,,,vllm,0.12,1024,1024,32,236,20",
        "agg,Qwen/Qwen3-32B,gb200,2,1,,,vllm,0.12,1024,1024,32,236,20",
        "disagg,Qwen/Qwen3-32B,h100_sxm,,,,,vllm,0.12,1024,1024,,236,20",
    ]
    (tmp_path / "refs.csv").write_text("\n".join(lines) + "\n")
    found = silicon_rows(tmp_path / "refs.csv")
    assert [row.measured for row in found] == [20, 236]
    assert all(row.condition.startswith("qwen3-32b, H100 TP2, vllm 0.12, 1024/1024") for row in found)


@pytest.mark.skipif(not SILICON.is_file(), reason="AIConfigurator's file is not beside this checkout")
def test_the_file_beside_the_checkout_has_rows_of_known_models():
    assert len(silicon_rows(SILICON)) >= 10
