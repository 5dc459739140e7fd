"""The Ascend NPU kernel set. Nothing here imports torch_npu or a kernel package until a set is built."""
