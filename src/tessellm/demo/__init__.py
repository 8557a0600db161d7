"""What `tessellm demo` does: five LoRA experts of a chat model, composed; their answers, a picture and a report."""
