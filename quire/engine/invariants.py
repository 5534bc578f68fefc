"""What must hold between any two calls of the scheduler, as one function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from quire.engine.block_key import same_prefix
from quire.engine.block_manager import BlockManager
from quire.engine.block_pool import Block
from quire.engine.fair_shares import FairShares
from quire.engine.host_tier import HostTier
from quire.engine.request import Request
from quire.engine.request_table import RequestTable
from quire.engine.scheduler import Scheduler


class InvariantError(AssertionError):
    """The engine's bookkeeping contradicts itself: a bug in Quire, never the user's fault."""


def check_invariants(scheduler: Scheduler) -> None:
    """Raises InvariantError, saying what is wrong, unless all of this holds:

    - every block but 0 is either referenced or in the free list (where cached ones stay until they
      are taken); a block's reference count is the number of block tables it is in;
    - the prefix cache maps each digest to the one block that carries it, and a request's cached
      blocks hold the request's own tokens; a host slot is free or listed once;
    - each row is free or owned by one running request; queues and groups agree;
    - committed <= computed <= tokens, placeholders equal the samples in flight, blocks hold what is
      computed.
    """
    check_blocks(scheduler.blocks, scheduler.table.running)
    check_requests(scheduler)


def check_requests(scheduler: Scheduler) -> None:
    """The part about requests and rows; its time does not depend on the number of blocks."""
    _check_queues(scheduler)
    _check_counts(scheduler)


def check_blocks(blocks: BlockManager, holders: Iterable[Request]) -> None:
    """The part about blocks; `holders` are all requests that have any."""
    pool = blocks.pool
    num_strange = sum(pool.blocks[block.block_id] is not block for block in pool.free)
    if num_strange:
        raise InvariantError(f"{num_strange} blocks of the free list are not the pool's")
    references: Counter[int] = Counter()
    for request in holders:
        references.update([block.block_id for block in request.block_table if block.block_id])
        for state in (*request.states, *request.left_states):
            references.update([block.block_id for block in state.blocks])
        check_table(blocks, request)
        check_states(blocks, request)
    for block in pool.blocks:
        check_block(blocks, block, references[block.block_id])
    # Every block that has a name is listed by it, so with equal numbers nothing else is listed.
    num_named = sum(block.key is not None for block in pool.blocks)
    if num_named != len(blocks.cache):
        raise InvariantError(f"{num_named} blocks have names, the cache knows {len(blocks.cache)}")
    check_host_sums(blocks.host)
    if not all(map(blocks.host.is_sound, range(blocks.host.num_slots))):
        raise InvariantError("host slots are lost, used twice or stored under another name")


def check_block(blocks: BlockManager, block: Block, num_tables: int) -> None:
    """A block is free, or in as many block tables as its reference count says; the cache lists it
    by its name.
    """
    is_free = block in blocks.pool.free
    if block.ref_count != num_tables:
        raise InvariantError(f"{block} is in {num_tables} block tables")
    if is_free != (block.block_id != 0 and block.ref_count == 0):
        raise InvariantError(
            f"{block} is {'free and owned' if is_free else 'neither free nor owned'}"
        )
    if block.key is not None and not blocks.cache.knows(block):
        raise InvariantError(f"{block} is cached under another name")


def check_table(blocks: BlockManager, request: Request) -> None:
    """One request's blocks carry its own tokens, as many as it has computed."""
    config, groups = blocks.config, blocks.config.num_groups
    kept = [config.first_kept(group, request.num_committed_tokens) for group in range(groups)]
    for index, block in enumerate(request.block_table):
        if block.block_id == 0 and index // groups >= kept[index % groups]:
            raise InvariantError(
                f"request {request.request_id} lacks a block at {index}, which it may look at"
            )
        if block.key is None:
            continue
        if blocks.cache.is_partial(block.key):
            first, held = index // groups * blocks.block_size, block.key.token_ids
            matches = tuple(request.token_ids[first : first + len(held)]) == held
        else:
            matches = index >= len(request.block_keys) or same_prefix(
                block.key, request.block_keys[index]
            )
        if not matches:
            raise InvariantError(
                f"request {request.request_id} holds {block}, which is another prefix"
            )
    if blocks.num_held(request) < request.num_computed_tokens:
        raise InvariantError(
            f"request {request.request_id} computed {request.num_computed_tokens} tokens into "
            f"{len(request.block_table)} blocks"
        )


def check_states(blocks: BlockManager, request: Request) -> None:
    """A running request has the two states it may need next, and those of its states that are
    cached are its own.
    """
    spec = blocks.config.state
    if spec is None:
        return
    if len(request.states) != 2 or any(
        len(state.blocks) != spec.num_blocks for state in request.states
    ):
        raise InvariantError(
            f"request {request.request_id} lacks blocks for its states: {request.states}"
        )
    # Where draft tokens in flight may be wrong, computing goes on from before them.
    for position in (
        request.num_computed_tokens,
        request.num_computed_tokens - request.num_draft_tokens,
    ):
        chunk = position // spec.chunk
        if chunk and request.states[chunk % 2].chunk != chunk:
            raise InvariantError(
                f"request {request.request_id} is at token {position}, without the state before it"
            )
    for state in (*request.states, *request.left_states):
        for number, block in enumerate(state.blocks):
            last = (state.chunk * spec.chunk // blocks.block_size - 1) * blocks.config.num_groups
            if block.key is None or last >= len(request.block_keys):
                continue
            is_own = state.chunk > 0 and same_prefix(block.key.parent, request.block_keys[last])
            if not is_own or block.key.extra_keys != (f"state {number}",):
                raise InvariantError(
                    f"request {request.request_id} has the state of another prefix in {block}"
                )


def check_host_sums(host: HostTier) -> None:
    """No slot is lost or counted twice, and none is still pinned for reading."""
    if host.num_free + len(host) != host.num_slots:
        raise InvariantError(
            f"{host.num_free} host slots are free and {len(host)} named of {host.num_slots}"
        )
    if host.pinned:
        raise InvariantError(f"host slots {sorted(host.pinned)} stayed pinned")


def _check_queues(scheduler: Scheduler) -> None:
    """Queues, rows and groups: each has the requests that it should have, and no others."""
    table = scheduler.table
    queues = (*table.waiting.queues, table.running)
    for queue in queues:
        if any(queue.order(one) >= queue.order(other) for one, other in pairwise(queue)):
            raise InvariantError("a queue is out of order")
    names = [request.request_id for queue in queues for request in queue]
    if len(table.waiting) + len(table.running) != len(names):
        raise InvariantError(f"{len(table.waiting)} requests wait by the queue's own count")
    if table.shares is not None:
        _check_shares(table, table.shares)
    if sorted(names) != sorted(table.requests):
        raise InvariantError(f"{sorted(names)} are queued, {sorted(table.requests)} known")
    rows = table.free_rows.copy()
    for request in table.running:
        if request.row is None:
            raise InvariantError(f"{request.request_id} runs without a row")
        rows.append(request.row)
    if sorted(rows) != list(range(scheduler.config.max_num_seqs)):
        raise InvariantError(f"rows are lost or owned twice: {sorted(rows)}")
    for request in table.waiting:
        if request.row is not None or request.num_computed_tokens:
            raise InvariantError(
                f"{request.request_id} waits, but has row {request.row} or computed tokens"
            )
        if request.block_table:
            raise InvariantError(
                f"{request.request_id} waits, but has blocks: {request.block_table}"
            )
    grouped = sorted(request.request_id for members in table.groups.values() for request in members)
    expected = sorted(
        name for name, request in table.requests.items() if request.group_id is not None
    )
    if grouped != expected:
        raise InvariantError(f"{grouped} are in groups, {expected} should be")


def _check_shares(table: RequestTable, shares: FairShares) -> None:
    live = Counter(request.tenant for request in table.requests.values())
    rows = Counter(request.tenant for request in table.running)
    if live != shares.num_live or rows != shares.rows:
        raise InvariantError(
            f"tenants have {dict(live)} requests and {dict(rows)} rows, not "
            f"{dict(shares.num_live)} and {dict(shares.rows)}"
        )
    if shares.without_row != live.keys() - rows.keys():
        raise InvariantError(
            f"{sorted(shares.without_row)} are kept as tenants that wait without a row; live are "
            f"{sorted(live)}, and {sorted(rows)} have rows"
        )


def _check_counts(scheduler: Scheduler) -> None:
    in_flight: Counter[Request] = Counter()
    draft_tokens: Counter[Request] = Counter()
    for step, requests in scheduler.in_flight:
        for request, entry in zip(requests, step.scheduled, strict=True):
            in_flight[request] += entry.samples + len(entry.draft_tokens)
            draft_tokens[request] += len(entry.draft_tokens)
    for name, request in scheduler.table.requests.items():
        committed, computed, tokens = (
            request.num_committed_tokens,
            request.num_computed_tokens,
            request.num_tokens,
        )
        if (
            request.num_placeholders != in_flight[request]
            or request.num_draft_tokens != draft_tokens[request]
        ):
            raise InvariantError(
                f"{name} has {request.num_placeholders} placeholders, {request.num_draft_tokens} of them drafts; "
                f"in flight are {in_flight[request]} and {draft_tokens[request]}"
            )
        if not 0 <= committed <= computed <= tokens:
            raise InvariantError(
                f"{name} committed {committed}, computed {computed} of {tokens} tokens"
            )
        if not tokens <= request.max_total_tokens <= scheduler.config.max_model_len:
            raise InvariantError(
                f"{name} has {tokens} of at most {request.max_total_tokens} tokens"
            )
        config = scheduler.config
        if (
            len(request.block_keys)
            > len(request.token_ids) // config.block_size * config.num_groups
        ):
            raise InvariantError(f"{name} has names for blocks it has not filled")
