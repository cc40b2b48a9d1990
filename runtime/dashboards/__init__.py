"""Where metrics of runs go (--log): CSV files, TensorBoard, Weights & Biases."""
