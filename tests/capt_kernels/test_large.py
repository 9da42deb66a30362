"""More than 2^31 elements: row offsets are 64-bit. Needs a GPU with room; the C++ kernels are checked on virtual memory."""

import pytest
import torch

import capt_kernels as ck

WIDTH = 4096
ROWS = 2**31 // WIDTH + 64


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 40 * 2**30,
    reason="two bf16 tensors of 2^31 elements and their result want a GPU with 40 GiB",
)
def test_rows_beyond_two_to_the_31_elements_on_a_gpu():
    hidden = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
    hidden[-4:] = 2.0
    cu_seqlens = torch.tensor([0, ROWS - 4, ROWS], dtype=torch.int32, device="cuda")
    prompt = torch.zeros(WIDTH, device="cuda", requires_grad=True)
    weight = torch.ones(WIDTH, dtype=torch.bfloat16, device="cuda")
    refreshed = ck.capsule_refresh(hidden, prompt, cu_seqlens=cu_seqlens, backend="triton")
    assert (refreshed[-4] == 2.0).all()
    assert (refreshed[0] == 0).all()
    del refreshed
    normed, total = ck.add_rms_norm(None, hidden, weight, 1e-6, prompt=prompt, cu_seqlens=cu_seqlens, backend="triton")
    assert (normed[-4:].float() - 1).abs().max() < 1e-2
    total[-4:].sum().backward()
    assert (prompt.grad == 1).all()


def test_a_row_stride_beyond_32_bits_on_cpu():
    """Two rows of a tensor that lie 2^31 elements apart; only their own pages are touched."""
    if not ck.backends()["cpu"].available:
        pytest.skip(ck.backends()["cpu"].reason)
    memory = torch.empty(2**31 + 64, dtype=torch.float32)
    rows = memory.as_strided((2, 8), (2**31, 1))
    rows[0], rows[1] = 1.0, 3.0
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)
    out = ck.capsule_refresh(rows, torch.zeros(8), cu_seqlens=cu_seqlens, backend="cpu")
    assert out.tolist() == [[2.0] * 8, [3.0] * 8]
    normed, total = ck.add_rms_norm(
        None, rows, torch.ones(8), 0.0, prompt=torch.zeros(8), cu_seqlens=cu_seqlens, backend="cpu"
    )
    assert total.tolist() == [[2.0] * 8, [3.0] * 8]
    assert normed.tolist() == [[1.0] * 8, [1.0] * 8]
