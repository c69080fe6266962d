"""Small builds of models of transformers, timm, diffusers and peft, lifted. See __main__.py."""
