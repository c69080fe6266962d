"""Small builds of models of transformers, timm, diffusers and peft. Each file has those of one library."""
