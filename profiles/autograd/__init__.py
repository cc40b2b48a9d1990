"""What autograd needs of a stage's borders: inlets, saved tensors, split backwards, fused steps."""
