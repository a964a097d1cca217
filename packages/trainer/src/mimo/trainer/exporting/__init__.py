"""Modules of checkpoints into Hugging Face folders and adapters, with their LoRA products merged."""
