// Registers the gated activation for the CPU key.
#include "glu.h"

#include <string>
#include <tuple>

#include "tensors.h"

namespace capt {
namespace {

Activation activation(const std::string& kind) {
  if (kind == "silu") return Activation::SiLU;
  if (kind == "gelu") return Activation::GELU;
  if (kind == "gelu_tanh") return Activation::GELUTanh;
  STD_TORCH_CHECK(kind == "relu", "kind must be silu, gelu, gelu_tanh or relu, got ", kind);
  return Activation::ReLU;
}

void check_gate(const Tensor& gate, const Tensor& up) {
  check_floating("gate", gate);
  STD_TORCH_CHECK(gate.dim() > 0, "gate must have shape [..., F], got a scalar");
  check_like("up", up, gate);
}

Tensor gated_activation(const Tensor& gate, const Tensor& up, std::string kind) {
  check_gate(gate, up);
  const Tensor gates = with_dense_rows(gate), ups = with_dense_rows(up);
  const Shape shape = shape_of(gates);
  Tensor out = empty(sizes_of(gate), gate.scalar_type());
  gated_activation_kernel({gate.scalar_type(), activation(kind), shape.batch, shape.rows, shape.width, rows_of(gates),
                           rows_of(ups), rows_of(out)});
  return out;
}

std::tuple<Tensor, Tensor> gated_activation_backward(
    const Tensor& grad, const Tensor& gate, const Tensor& up, std::string kind, bool need_gate, bool need_up) {
  check_gate(gate, up);
  check_like("grad", grad, gate);
  const Tensor grads = with_dense_rows(grad), gates = with_dense_rows(gate), ups = with_dense_rows(up);
  const Shape shape = shape_of(gates);
  const std::vector<int64_t> sizes = sizes_of(gate), none = {0};
  Tensor grad_gate = empty(need_gate ? sizes : none, gate.scalar_type());
  Tensor grad_up = empty(need_up ? sizes : none, gate.scalar_type());
  gated_activation_backward_kernel(
      {gate.scalar_type(), activation(kind), shape.batch, shape.rows, shape.width, rows_of(grads), rows_of(gates),
       rows_of(ups), need_gate ? rows_of(grad_gate) : Rows{}, need_up ? rows_of(grad_up) : Rows{}});
  return {grad_gate, grad_up};
}

}  // namespace
}  // namespace capt

STABLE_TORCH_LIBRARY_IMPL(capt_kernels, CPU, library) {
  library.impl("gated_activation", TORCH_BOX(&capt::gated_activation));
  library.impl("gated_activation_backward", TORCH_BOX(&capt::gated_activation_backward));
}
