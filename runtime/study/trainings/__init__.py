"""The many trainings of a study, in processes that stay."""
