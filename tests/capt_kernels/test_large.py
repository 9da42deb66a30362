"""More than 2^31 elements: row offsets are 64-bit. On a GPU with room; the C++ kernels on virtual memory."""

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


def far_apart(*shape):
    """The first dimension lies 2^31 elements apart; only its own pages are touched."""
    memory = torch.empty(2**31 + 64, dtype=torch.float32)
    inner = torch.empty(shape[1:]).stride()
    return memory.as_strided(shape, (2**31, *inner))


@pytest.mark.skipif(not ck.backends()["cpu"].available, reason=ck.backends()["cpu"].reason)
def test_a_row_stride_beyond_32_bits_on_cpu():
    rows = far_apart(2, 8)
    rows[0], rows[1] = 1.0, 3.0
    where = {"cu_seqlens": torch.tensor([0, 2], dtype=torch.int32), "backend": "cpu"}
    assert ck.capsule_refresh(rows, torch.zeros(8), **where).tolist() == [[2.0] * 8, [3.0] * 8]
    assert ck.capsule_prepend(rows, torch.zeros(8), **where).tolist() == [[2.0] * 8, [1.0] * 8, [3.0] * 8]
    normed, total = ck.add_rms_norm(None, rows, torch.ones(8), 0.0, prompt=torch.zeros(8), **where)
    assert total.tolist() == [[2.0] * 8, [3.0] * 8]
    assert normed.tolist() == [[1.0] * 8, [1.0] * 8]
    assert ck.gated_activation(rows, rows, "relu", backend="cpu").tolist() == [[1.0] * 8, [9.0] * 8]
    normed, _ = ck.add_rms_norm(None, rows, torch.ones(8), 0.0, backend="cpu")
    assert normed.tolist() == [[1.0] * 8, [1.0] * 8]

    batch = far_apart(2, 3, 4)
    batch[0], batch[1] = 1.0, 3.0
    assert ck.capsule_prepend(batch, torch.zeros(4), backend="cpu")[:, 0, 0].tolist() == [1.0, 3.0]
    packed, _, indices = ck.pack(batch, torch.tensor([[0, 0, 1], [1, 0, 0]]), backend="cpu")
    assert packed.tolist() == [[1.0] * 4, [3.0] * 4]
    unpacked = ck.unpack(far_apart(2, 4).copy_(packed), indices, 2, 3, backend="cpu")
    assert unpacked.sum(-1).tolist() == [[0.0, 0.0, 4.0], [12.0, 0.0, 0.0]]
    cos, sin = far_apart(2, 4).fill_(0), far_apart(2, 4).fill_(1)
    for turned in ck.apply_rotary(batch[:, :2], batch[:, 2:], cos, sin, backend="cpu"):  # a quarter turn
        assert turned[:, 0].tolist() == [[-1.0, -1.0, 1.0, 1.0], [-3.0, -3.0, 3.0, 3.0]]
