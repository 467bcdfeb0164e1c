"""GPU kernels: tree attention and fused norms in Triton, causal attention through cuDNN.

Importing this package needs no GPU. The modules with Triton kernels need Triton, which only a torch for CUDA brings, so
they are imported where they are used: tree attention by `ramify.model.tree_attention`, the norms by
`ramify.model.graph_rewrites`.
"""
