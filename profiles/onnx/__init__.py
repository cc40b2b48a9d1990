"""ONNX files as torch modules that can be traced and trained."""
