"""What `tessellm demo` does: five LoRA experts of a chat model, composed; or letters, from training on."""
