"""Triton kernels of align: ids -> expert order, stable and without atomics on data.

    chunk p: rank of each row among earlier rows of its chunk and expert; histogram of the chunk     (all programs)
    the program that ends last: exclusive sums of the histograms over chunks, first row of each expert
    row r goes to  first row of its expert + rows of earlier chunks + rank in its chunk

The last program is known by a ticket, an atomic counter that it sets back to zero. Up to some thousand rows it places
all rows itself, so that there is one launch; beyond, a second launch places them with all programs.
"""

import triton
import triton.language as tl


@triton.jit
def local_expert(
    ids_pointer, map_pointer, r_C, R, NUM_EXPERTS: tl.constexpr, NUM_LOCAL: tl.constexpr, HAS_MAP: tl.constexpr
):
    """Return the local expert of routed rows; -1 past the end, for ids out of range and for experts elsewhere.

    Ids may come from other programs of this launch, so they are read past the first-level cache.
    """
    id_C = tl.load(ids_pointer + r_C, mask=r_C < R, other=-1, cache_modifier=".cg")
    is_known_C = (id_C >= 0) & (id_C < NUM_EXPERTS)
    expert_C = tl.where(is_known_C, id_C, -1).to(tl.int32)
    if HAS_MAP:
        expert_C = tl.load(map_pointer + expert_C, mask=is_known_C, other=-1)
        expert_C = tl.where((expert_C >= 0) & (expert_C < NUM_LOCAL), expert_C, -1)
    return expert_C


@triton.jit
def write_experts(expert_pointer, end_E, first, step, J, NUM_LOCAL: tl.constexpr, BLOCK_J: tl.constexpr):
    """Write the expert of blocks first .. first + BLOCK_J - 1, and so on every `step`: experts that end before them."""
    for start in range(first, J, step):
        j_J = start + tl.arange(0, BLOCK_J)
        expert_J = tl.sum((end_E[None, :] <= j_J[:, None]).to(tl.int32), 1)
        tl.store(expert_pointer + j_J, tl.where(expert_J < NUM_LOCAL, expert_J, -1), mask=j_J < J)


@triton.jit
def place_rows(
    ids_pointer,
    map_pointer,
    histogram_pointer,
    rank_pointer,
    first_pointer,
    routed_pointer,
    position_pointer,
    r_C,
    R,
    NUM_EXPERTS: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_MAP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write both maps between routed rows r_C and the order."""
    expert_C = local_expert(ids_pointer, map_pointer, r_C, R, NUM_EXPERTS, NUM_LOCAL, HAS_MAP)
    is_here_C = expert_C >= 0
    earlier_C = tl.load(histogram_pointer + r_C // CHUNK * BLOCK_E + expert_C, mask=is_here_C, other=0)
    first_C = tl.load(first_pointer + expert_C, mask=is_here_C, other=0)
    rank_C = tl.load(rank_pointer + r_C, mask=is_here_C, other=0, cache_modifier=".cg")
    row_C = first_C + earlier_C + rank_C
    tl.store(routed_pointer + row_C, r_C, mask=is_here_C)
    tl.store(position_pointer + r_C, tl.where(is_here_C, row_C, -1), mask=r_C < R)


@triton.jit
def finish(
    ids_pointer,
    map_pointer,
    histogram_pointer,
    rank_pointer,
    first_pointer,
    end_pointer,
    routed_pointer,
    position_pointer,
    expert_pointer,
    num_rows_pointer,
    R,
    J,
    num_chunks,
    NUM_EXPERTS: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_MAP: tl.constexpr,
    CHUNK: tl.constexpr,
    PLACE: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """What the last program does: sums over chunks, first rows, and with PLACE all that a second launch would do."""
    e_E = tl.arange(0, BLOCK_E)
    num_E = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_chunks, ROWS):
        p_P = start + tl.arange(0, ROWS)
        offset_PE = p_P[:, None] * BLOCK_E + e_E[None, :]
        is_chunk_PE = (p_P[:, None] < num_chunks) & (e_E[None, :] < BLOCK_E)
        num_PE = tl.load(histogram_pointer + offset_PE, mask=is_chunk_PE, other=0, cache_modifier=".cg")
        tl.store(histogram_pointer + offset_PE, num_E[None, :] + tl.cumsum(num_PE, 0) - num_PE, mask=is_chunk_PE)
        num_E += tl.sum(num_PE, 0)
    blocks_E = (num_E + BLOCK_M - 1) // BLOCK_M
    end_E = tl.cumsum(blocks_E, 0)
    tl.store(first_pointer + e_E, (end_E - blocks_E) * BLOCK_M)
    tl.store(num_rows_pointer, tl.sum(blocks_E, 0) * BLOCK_M)
    if PLACE:
        write_experts(expert_pointer, end_E, 0, BLOCK_J, J, NUM_LOCAL, BLOCK_J)
        tl.debug_barrier()  # sums and first rows are read by other threads than wrote them
        for start in range(0, R, SPAN):
            place_rows(
                ids_pointer,
                map_pointer,
                histogram_pointer,
                rank_pointer,
                first_pointer,
                routed_pointer,
                position_pointer,
                start + tl.arange(0, SPAN),
                R,
                NUM_EXPERTS,
                NUM_LOCAL,
                BLOCK_E,
                HAS_MAP,
                CHUNK,
            )
    else:
        tl.store(end_pointer + e_E, end_E)


@triton.jit
def fill_padding(routed_pointer, p, num_programs, R, M, SPAN: tl.constexpr):
    """Write R into this program's share of the order; the rows in use are overwritten later."""
    for start in range(p * SPAN, M, num_programs * SPAN):
        m_C = start + tl.arange(0, SPAN)
        tl.store(routed_pointer + m_C, m_C * 0 + R, mask=m_C < M)


@triton.jit
def is_last(ticket_pointer, num_programs):
    """Return whether all other programs have come here; what they wrote before is then visible. Resets the ticket."""
    tl.debug_barrier()  # every thread of this program has written before one of them takes the ticket
    arrived = tl.atomic_add(ticket_pointer, 1, sem="acq_rel")
    if arrived == num_programs - 1:
        tl.store(ticket_pointer, 0)
    return arrived == num_programs - 1


@triton.jit(do_not_specialize=["R", "M", "J", "num_chunks"])
def count(
    ids_pointer,
    map_pointer,
    histogram_pointer,
    rank_pointer,
    first_pointer,
    end_pointer,
    routed_pointer,
    position_pointer,
    expert_pointer,
    num_rows_pointer,
    ticket_pointer,
    R,
    M,
    J,
    num_chunks,
    NUM_EXPERTS: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_MAP: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    PLACE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Program p: rows p * CHUNK on. Ranks by comparing each row with STEP rows at a time: no sort, few registers."""
    p = tl.program_id(0)
    c_C = tl.arange(0, CHUNK)
    r_C = p * CHUNK + c_C
    expert_C = local_expert(ids_pointer, map_pointer, r_C, R, NUM_EXPERTS, NUM_LOCAL, HAS_MAP)
    rank_C = tl.zeros([CHUNK], tl.int32)
    for start in range(0, CHUNK, STEP):
        s_S = start + tl.arange(0, STEP)
        other_S = local_expert(ids_pointer, map_pointer, p * CHUNK + s_S, R, NUM_EXPERTS, NUM_LOCAL, HAS_MAP)
        is_before_CS = (expert_C[:, None] == other_S[None, :]) & (s_S[None, :] < c_C[:, None])
        rank_C += tl.sum(is_before_CS.to(tl.int32), 1)
    num_E = tl.histogram(tl.where(expert_C < 0, 0, expert_C), BLOCK_E, mask=expert_C >= 0)
    tl.store(histogram_pointer + p * BLOCK_E + tl.arange(0, BLOCK_E), num_E)
    tl.store(rank_pointer + r_C, rank_C, mask=r_C < R)
    fill_padding(routed_pointer, p, num_chunks, R, M, CHUNK)
    if is_last(ticket_pointer, num_chunks):
        finish(
            ids_pointer,
            map_pointer,
            histogram_pointer,
            rank_pointer,
            first_pointer,
            end_pointer,
            routed_pointer,
            position_pointer,
            expert_pointer,
            num_rows_pointer,
            R,
            J,
            num_chunks,
            NUM_EXPERTS,
            NUM_LOCAL,
            BLOCK_E,
            BLOCK_M,
            HAS_MAP,
            CHUNK,
            PLACE,
            CHUNK,
            ROWS,
            BLOCK_J,
        )


@triton.jit(do_not_specialize=["R", "J", "num_chunks"])
def place(
    ids_pointer,
    map_pointer,
    histogram_pointer,
    rank_pointer,
    first_pointer,
    end_pointer,
    routed_pointer,
    position_pointer,
    expert_pointer,
    R,
    J,
    num_chunks,
    NUM_EXPERTS: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_MAP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Program p: places the rows of chunk p and writes its share of the blocks' experts."""
    p = tl.program_id(0)
    end_E = tl.load(end_pointer + tl.arange(0, BLOCK_E))
    write_experts(expert_pointer, end_E, p * BLOCK_J, num_chunks * BLOCK_J, J, NUM_LOCAL, BLOCK_J)
    place_rows(
        ids_pointer,
        map_pointer,
        histogram_pointer,
        rank_pointer,
        first_pointer,
        routed_pointer,
        position_pointer,
        p * CHUNK + tl.arange(0, CHUNK),
        R,
        NUM_EXPERTS,
        NUM_LOCAL,
        BLOCK_E,
        HAS_MAP,
        CHUNK,
    )
