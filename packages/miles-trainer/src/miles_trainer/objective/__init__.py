"""The objective as pure functions on flat tensors: no models, no ranks, no configuration objects.

Shapes: M tokens of all samples one after another (response tokens or trained tokens), S samples, V vocabulary.
A ragged array is a flat [M] tensor with `sample_index` int64 [M]. Masks are bool [M].
"""
