"""The lab of tessellm: experiments, one folder each (common/ is what they share), theory, probe, particles."""
