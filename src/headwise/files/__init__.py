"""Reading and writing files: JSON, safetensors, atomic writes."""
