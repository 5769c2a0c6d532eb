"""The pool works in a cluster while slots move, and while a node is lost."""

import pytest
from redis.crc import key_slot

from drafter_svc.pools.redis import Query
from tests.ngram.pools import TENANT, found, pool, written
from tests.redis_servers import Cluster
from tests.waiting import until, wait_until


async def test_a_batch_is_one_mget_for_each_slot_on_all_nodes(
    cluster: Cluster,
) -> None:
    async with pool(cluster.server) as made:
        tenant = made.tenant(TENANT)
        await written(made, *(([i, i + 1, i + 2], [9]) for i in range(32)))
        queries = [Query(tenant, [[i, i + 1, i + 2], [i + 1, i + 2], [i + 2]]) for i in range(32)]
        for query in queries:
            assert len({key_slot(key) for key in query.tenant.keys(query.ngrams)}) == 1
        cluster.each("CONFIG", "RESETSTAT")
        assert await made.lookup(queries[:1]) == [[9]]
        assert sorted(calls(cluster)) == [0, 0, 1]
        cluster.each("CONFIG", "RESETSTAT")
        assert await made.lookup(queries) == [[9]] * 32
        assert min(calls(cluster)) > 0
        # The last tokens of 32 sequences are in 16 buckets, each in a different slot.
        assert sum(calls(cluster)) == 16
        assert min(len(keys) for keys in cluster.each("KEYS", "*")) > 0


def calls(cluster: Cluster) -> list[int]:
    """Return the number of MGET commands that each node has run."""
    return [
        stats.get("cmdstat_mget", {"calls": 0})["calls"]
        for stats in cluster.each("INFO", "commandstats")
    ]


@pytest.mark.slow
async def test_moving_slots_are_followed(cluster: Cluster) -> None:
    """All used slots of a node move to another node; the pool looks up while one slot moves."""
    async with pool(cluster.server) as made:
        await written(made, *(([i], [i + 1]) for i in range(64)))
        tenant = made.tenant(TENANT)
        tokens = {key_slot(tenant.index([i])): i for i in range(16)}
        slots = sorted(tokens.keys() & set(range(5461)))
        source = cluster.data[0]
        target = cluster.grow()
        assert slots
        with source.admin() as one, target.admin() as other:
            ids = [client.cluster("myid").decode() for client in (one, other)]
            for number, slot in enumerate(slots):
                other.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
                one.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
                keys = one.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100)
                one.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
                if number == 0:
                    # The slot is half moved: the source redirects each command to the target.
                    token = tokens[slot]
                    # redis-py does not know a node without slots, so it finds nothing there.
                    assert await found(made, [[token]], [[token + 1]]) == [[], [token + 2]]
                    assert await found(made, [[token]]) == [[]]
                    await until(lambda: made.available)
                for client in (other, one):
                    client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
        for _ in range(3):
            assert await found(made, *([[i]] for i in range(64))) == [[i + 1] for i in range(64)]
        await written(made, *(([i], [i + 2]) for i in range(64)))
        assert await found(made, *([[i]] for i in range(64))) == [[i + 2] for i in range(64)]
        assert made.counters.failed == 1
        assert calls(cluster)[cluster.data.index(target)] > 0


@pytest.mark.slow
async def test_a_lost_cluster_node_costs_guesses_until_it_is_back(cluster: Cluster) -> None:
    async with pool(cluster.server, budget_s=0.1) as made:
        await written(made, *(([i], [i + 1]) for i in range(64)))
        cluster.data[0].kill()
        queries = [[[i]] for i in range(64)]
        assert [] in await found(made, *queries)
        cluster.data[0].start()
        wait_until(lambda: all(cluster.is_whole(node) for node in cluster.data))
        for _ in range(100):
            await until(lambda: made.available, 15)
            if (await found(made, *queries)).count([]) < 64:
                break
        # The node has lost its keys, and the other nodes still have theirs.
        answers = await found(made, *queries)
        assert all(answer in ([], [i + 1]) for i, answer in enumerate(answers))
        assert 0 < answers.count([]) < 64
        await until(lambda: made.available, 15)
        before = made.counters.written
        while made.counters.written == before:
            made.offer(made.tenant(TENANT), [1], [7])
            await until(lambda: made.counters.written > before or made._writes.empty())
