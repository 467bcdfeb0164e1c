"""GPU kernels in Triton, and causal attention through cuDNN.

For the trainer: tree attention and fused norms. For the engine: attention over the paged cache, the operators between
the products of a decoder, and sampling.

Importing this package needs no GPU. The modules with Triton kernels need Triton, which only a torch for CUDA brings, so
they are imported where they are used: tree attention by `ramify.model.tree_attention`, the norms by
`ramify.model.graph_rewrites`, the others by `ramify.infer.cuda_runner` and `ramify.model.fused_model`.
"""
