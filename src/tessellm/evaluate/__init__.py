"""One protocol for base, experts, composition and merges: lm-eval's tasks, MATH, evalplus, tables with intervals."""
