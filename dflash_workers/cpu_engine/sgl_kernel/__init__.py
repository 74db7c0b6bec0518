"""Stand-in for SGLang's kernel package, whose wheels are CUDA builds only.

With it SGLang 0.5.17 runs on its native PyTorch path: the real HTTP API, scheduler, radix cache,
sampling and model code, but none of its kernels, so speed here says nothing about a GPU's. It
registers no torch.ops.sgl_kernel operator: SGLang's probe for its Intel AMX backend looks for one
there, and without it every layer takes the native path. Defined here are only the names that SGLang
imports unconditionally when SGLANG_USE_CPU_ENGINE=1, under the parameters it calls them with.
"""

import ctypes

import torch

__version__ = "0.0.0+cpu.standin"


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len
):
    """Write each request's new cache slots into its row of the table."""
    taken = 0
    for row, first, last in _ranges(req_pool_indices, start, end):
        count = last - first
        req_to_token[row, first:last] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def assign_extend_cache_locs_cpu(
    req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len
):
    """The inverse: read each request's cache slots out of its row, one after another."""
    filled = 0
    for row, first, last in _ranges(req_pool_indices, start, end):
        count = last - first
        out_cache_loc[filled : filled + count] = req_to_token[row, first:last].to(
            out_cache_loc.dtype
        )
        filled += count


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Move cache slots in every layer's buffer; all are read before any is written."""
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(base + source * stride, stride) for source in sources]
        for target, slot in zip(targets, slots, strict=True):
            ctypes.memmove(base + target * stride, slot, stride)


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """The last accepted token of each request."""
    num_requests = accept_lens.numel()
    last = torch.arange(num_requests) * accept_stride + accept_lens.long() - 1
    bonus_tokens[:num_requests] = accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """The cache slots of the accepted tokens, packed to the front."""
    accepted = accept_index.reshape(-1)
    accepted = accepted[accepted > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def rotate_input_ids_cpu(*args, **kwargs):
    """Needed by speculation only, which SGLang refuses on a CPU."""
    raise NotImplementedError("sgl_kernel.rotate_input_ids_cpu has no CPU stand-in")


def assign_draft_cache_locs_contiguous_cpu(*args, **kwargs):
    """Needed by speculation only."""
    raise NotImplementedError("sgl_kernel.assign_draft_cache_locs_contiguous_cpu has no stand-in")


def build_tree_kernel_efficient_cpu(*args, **kwargs):
    """Needed by speculation only."""
    raise NotImplementedError("sgl_kernel.build_tree_kernel_efficient_cpu has no stand-in")


def verify_tree_greedy_cpu(*args, **kwargs):
    """Needed by speculation only."""
    raise NotImplementedError("sgl_kernel.verify_tree_greedy_cpu has no stand-in")


def _ranges(rows, start, end):
    return zip(rows.tolist(), start.tolist(), end.tolist(), strict=True)
