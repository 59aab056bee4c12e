# SPDX-License-Identifier: Apache-2.0
"""Pure: texts of exceptions of torch, numpy and Python that have no value, size or name in them, at most one
of few types. They alone may leave a device with the place of an error.
"""

from __future__ import annotations

import re

_TYPES = "(?:Bool|Byte|Char|Short|Int|Long|Half|BFloat16|Float|Double|ComplexFloat|ComplexDouble)"
_NAMES = (
    r"(?:(?:CUDA)?(?:Bool|Byte|Char|Short|Int|Long|Half|BFloat16|Float|Double)Type|bool|unsigned char"
    r"|signed char|short|int|long int|long|c10::Half|c10::BFloat16|float|double)"
)
_SPARSE = "(?:Adadelta|Adafactor|Adamax|ASGD|NAdam|RAdam|RMSprop|Rprop)"
_FIXED = (
    # torch: gradients
    "element 0 of tensors does not require grad and does not have a grad_fn",
    "grad can be implicitly created only for scalar outputs",
    "a leaf Variable that requires grad is being used in an in-place operation.",
    "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.",
    "only Tensors of floating point dtype can require gradients",
    "Trying to backward through the graph a second time (or directly access saved tensors after they have"
    " already been freed). Saved intermediate values of the graph are freed when you call .backward() or"
    " autograd.grad(). Specify retain_graph=True if you need to backward through the graph a second time or"
    " if you need to access saved tensors after calling backward.",
    # torch: optimizers
    "Adam does not support sparse gradients, please consider SparseAdam instead",
    "SparseAdam does not support dense gradients, please consider Adam instead",
    "weight_decay option is not compatible with sparse gradients",
    "LBFGS.step() missing 1 required positional argument: 'closure'",
    # torch: tensors and batches
    "Boolean value of Tensor with more than one value is ambiguous",
    "index out of range in self",
    "all elements of input should be between 0 and 1",
    "stack expects a non-empty TensorList",
    "torch.cat(): expected a non-empty list of Tensors",
    "each element in list of batch should be of equal size",
    "default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found <class"
    " 'NoneType'>",
    "view size is not compatible with input tensor's size and stride (at least one dimension spans across two"
    " contiguous subspaces). Use .reshape(...) instead.",
    "Length of all samples has to be greater than 0, but found an element in 'lengths' that is <= 0",
    "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True. You can pass"
    " `enforce_sorted=False` to pack_padded_sequence and/or pack_sequence to sidestep this requirement if you"
    " do not need ONNX exportability.",
    "add(sparse, dense) is not supported. Use add(dense, sparse) instead.",
    "len() of a 0-d tensor",
    "iteration over a 0-d tensor",
    "Class values must be smaller than num_classes.",
    "Class values must be non-negative.",
    "probability tensor contains either `inf`, `nan` or element < 0",
    "invalid multinomial distribution (sum of probabilities <= 0)",
    "cannot sample n_sample > prob_dist.size(-1) samples without replacement",
    "max(): Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with the"
    " 'dim' argument.",
    "At least one stride in the given numpy array is negative, and tensors with negative strides are not"
    " currently supported. (You can probably work around this by making a copy of your array with"
    " array.copy().)",
    "can't convert np.ndarray of type numpy.object_. The only supported types are: float64, float32, float16,"
    " complex64, complex128, int64, int32, int16, int8, uint64, uint32, uint16, uint8, and bool.",
    "can't convert np.ndarray of type numpy.str_. The only supported types are: float64, float32, float16,"
    " complex64, complex128, int64, int32, int16, int8, uint64, uint32, uint16, uint8, and bool.",
    # numpy
    "The truth value of an array with more than one element is ambiguous. Use a.any() or a.all()",
    "zero-size array to reduction operation maximum which has no identity",
    "zero-size array to reduction operation minimum which has no identity",
    "only 0-dimensional arrays can be converted to Python scalars",
    "cannot convert float NaN to integer",
    "cannot convert float infinity to integer",
    "need at least one array to concatenate",
    "need at least one array to stack",
    "'a' cannot be empty unless no samples are taken",
    "Singular matrix",
    "buffer size must be a multiple of element size",
    "No data left in file",
    # Python
    "list index out of range",
    "tuple index out of range",
    "string index out of range",
    "pop from empty list",
    "division by zero",
    "float division by zero",
    "integer modulo by zero",
    "max() arg is an empty sequence",
    "min() arg is an empty sequence",
    "math domain error",
    "math range error",
    "Cannot choose from an empty sequence",
    "maximum recursion depth exceeded",
    "'NoneType' object is not subscriptable",
    "'NoneType' object is not callable",
    "'NoneType' object is not iterable",
    "cannot unpack non-iterable NoneType object",
    "object of type 'NoneType' has no len()",
)
_TYPED = (
    f"expected target dtype to be Long or Byte, but got {_TYPES}",
    f"result type {_TYPES} can't be cast to the desired output type {_TYPES}",
    f"Found dtype {_TYPES} but expected {_TYPES}",
    f"expected scalar type {_TYPES} but found {_TYPES}",
    f"mat1 and mat2 must have the same dtype, but got {_TYPES} and {_TYPES}",
    rf"Input type \({_NAMES}\) and (?:bias|weight) type \({_NAMES}\) should be the same",
    r"mean\(\): could not infer output dtype\. Input dtype must be either a floating point or complex dtype\."
    rf" Got: {_TYPES}",
    f"{_SPARSE} does not support sparse gradients",
)
_TEXT = re.compile("|".join((*map(re.escape, _FIXED), *_TYPED)))


def is_fixed(text: str) -> bool:
    """Return whether a text, in one line, is one of the closed set."""
    return bool(_TEXT.fullmatch(text))
