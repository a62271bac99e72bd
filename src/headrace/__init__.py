"""headrace: asynchronous reinforcement learning for language-model agents.

An open implementation of the GLM-5 training system (arXiv 2602.15763). See docs/architecture.md
for the rooms of this package and the laws that hold in it.
"""

__version__ = "0.1.0"
