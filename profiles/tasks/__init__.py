"""What a user writes: the interface of a task, and what its hooks give held against it."""
