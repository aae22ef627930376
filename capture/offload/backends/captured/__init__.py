"""What devices share that capture a model's work from a stream, as CUDA and Ascend do."""
