"""In place of torchvision, which has no build for torch on CPUs in package registries.

vLLM imports transformers' code for images with Qwen3.5, whose text model is all that is tested here.
"""

__version__ = "0"
