"""Models as files, folders, certificates and ONNX graphs."""
