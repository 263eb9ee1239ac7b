"""Says why entries that an earlier run stored cannot be used now, if their dtype is the reason."""

from ragkv.store import Identity, Store

SAMPLE = 64  # entries looked at: reading one takes a tenth of a millisecond


def other_dtype_note(store: Store, own: Identity, dtype_why: str) -> str | None:
    """Why nothing stored on this machine is reused, if entries of this model were made in another dtype.

    `own` is the identity of this engine's entries. `None` if some of them are of its dtype, or none of this model. The
    weights are not compared: their digest depends on the dtype.
    """
    mine = (own.architecture, own.rope, own.tokenizer, own.adapter)
    found = {
        info.identity.dtype
        for info in store.sample(SAMPLE)
        if (info.identity.architecture, info.identity.rope, info.identity.tokenizer, info.identity.adapter) == mine
    }
    if not found or own.dtype in found:
        return None
    others = " and ".join(sorted(found))
    return (
        f"the entries stored here were made in {others} and are not reused, because the model computes in {dtype_why}. "
        f"Set dtype = {min(found)} to use them, or delete them with `ragkv gc`"
    )


__all__ = ["other_dtype_note"]
