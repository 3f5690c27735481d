"""The table: every rule that keeps a hazard away, the text in the sources that is the rule, and the tests that fail without it.

    1 a slot is rewritten only after all that reads it is done     5 token history is positional; placeholders are refused
    2 nothing is published before its row check passed             6 no pageable copy, no implicit synchronisation per step
    3 a failed read fails those who wait for it, and no more       7 every page is bound to its store
    4 a batch may be cancelled at any time                         8 a forked child has nothing of its parent's store

`old` stands exactly once in its file; put `new` in its place and the rule is gone. A rule that no test misses is no rule:
whoever adds one here writes the test first. `remove` runs the table; the suite only checks that it fits the sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class RottenRuleError(Exception):
    """A rule's text is not, or not only once, in its file."""


@dataclass(frozen=True)
class Rule:
    """One rule. `tests`: pytest ids below tests/, all right with the rule, at least one wrong without it."""

    hazard: int
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    gpu: bool = False                                        # its tests need an NVIDIA GPU

    def removed_from(self, root: Path) -> str:
        """The file's text without the rule. RottenRuleError if the rule is not there, or there more than once."""
        text = (root / self.file).read_text()
        count = text.count(self.old)
        if count != 1:
            raise RottenRuleError(f"{self.name}: its text stands {count} times in {self.file}, expected once: fit the table to the sources")
        return text.replace(self.old, self.new)

    def missing_tests(self, root: Path) -> list[str]:
        """Those of its tests that are not there."""
        return [test for test in self.tests if f"def {test.partition('::')[2].partition('[')[0]}(" not in
                (root / "tests" / test.partition("::")[0]).read_text()]


RULES = (
    # ------------------------------------------------------------ 1: a slot is rewritten only after all that reads it is done
    Rule(1, "slots wait for the words of the gathers", "ssdgram/_publish.py",
         "    if batch.released != 0 and not words_arrived(plan, b):\n        return False",
         "    if False:\n        return False",
         ("test_planner_words.py::test_slots_stay_until_every_gathers_word_arrived",
          "test_planner_words.py::test_batches_end_in_the_order_of_their_words",
          "test_planner_words.py::test_a_batch_cancelled_before_its_tokens_came_keeps_their_memory")),
    Rule(1, "tokens of a device wait for their word", "ssdgram/_batches.py",
         "return plan.batches[b].flag == 0 or atomic_load_at(plan.batches[b].flag) == plan.batches[b].ticket",
         "return True",
         ("test_planner_words.py::test_tokens_are_looked_at_when_their_word_arrived",
          "test_planner_words.py::test_a_batch_cancelled_before_its_tokens_came_keeps_their_memory")),
    Rule(1, "only bundles that no batch uses are reclaimed", "ssdgram/_slots.py",
         "directory[s].group[way] != EMPTY and slots[slot].refs == 0 and slots[slot].status",
         "directory[s].group[way] != EMPTY and slots[slot].status",
         ("test_batch.py::test_addresses_stay_until_release", "test_store.py::test_many_batches_in_flight_share_the_cache")),
    Rule(1, "a slot in use stays when the policy pushes its bundle out", "ssdgram/_slots.py",
         "    stats[S_EVICTIONS] += 1\n    if slots[slot].refs == 0:",
         "    stats[S_EVICTIONS] += 1\n    if True:",
         ("test_batch.py::test_addresses_stay_until_release", "test_store.py::test_many_batches_in_flight_share_the_cache")),
    Rule(1, "the planner's thread does not plan while its memory is borrowed", "ssdgram/_planner.py",
         "    while atomic_load(state.control, PLANNER_ASLEEP) != AWAKE and not atomic_cas(\n"
         "            state.control, PLANNER_ASLEEP, np.int64(ASLEEP), np.int64(AWAKE)):", "    while False:",
         ("test_borrowed.py::test_nobody_else_plans_while_it_is_borrowed",)),
    Rule(1, "a caller plans only if he can borrow the memory", "ssdgram/_planner.py",
         "    if not atomic_cas(state.control, PLANNER_ASLEEP, np.int64(ASLEEP), np.int64(BORROWED)):", "    if False:",
         ("test_borrowed.py::test_nobody_else_plans_while_it_is_borrowed",)),
    Rule(1, "a ring does not take borrowed memory back", "ssdgram/queues/_handoff.py",
         "    if atomic_load(control, PLANNER_ASLEEP) == ASLEEP and atomic_cas(control, PLANNER_ASLEEP, ASLEEP, AWAKE):",
         "    if atomic_exchange(control, PLANNER_ASLEEP, AWAKE) != AWAKE:",
         ("test_borrowed.py::test_nobody_else_plans_while_it_is_borrowed",)),
    Rule(1, "the planner waits for the crew's last chunk", "ssdgram/_crew.py",
         "    while atomic_load(plan.crew, CREW_DONE) < count:", "    while False:",
         ("test_crew.py::test_counts_are_those_of_one_planner", "test_crew.py::test_mixed_batches_under_pressure",
          "test_crew.py::test_cancelled_while_the_crew_plans")),
    Rule(1, "two chunks that meet a bundle count it once", "ssdgram/_crew.py",
         "        if atomic_exchange_at(record + TICKET, ticket) == ticket:",
         "        if atomic_exchange_at(record + TICKET, ticket) == -5:",
         ("test_crew.py::test_counts_are_those_of_one_planner",)),
    Rule(1, "slots that the crew holds are not idle", "ssdgram/_lookup.py",
         "    plan.control[C_IDLE] -= chunks[words + K_IDLE]\n", "",
         ("test_crew.py::test_a_warm_batch_is_planned_by_the_crew",)),
    Rule(1, "slots that the crew holds are listed with their batch's", "ssdgram/_lookup.py",
         "        mine.held += chunks[words + K_HELD + layer]\n", "",
         ("test_crew.py::test_a_warm_batch_is_planned_by_the_crew",)),
    Rule(1, "a gather is refused if the store was closed meanwhile", "ssdgram/_gather.py",
         "    batch._check()                                           # closed meanwhile",
         "    pass                                                     # closed meanwhile",
         ("test_store_lifetime.py::test_a_result_gathered_during_close_is_right_or_refused",)),

    # ------------------------------------------------------------ 2: nothing is published before its row check passed
    Rule(2, "a row is placed only if its checksum is right", "ssdgram/_deliver.py",
         "if found == load_u32(checks + 4 * place):", "if found == found:",
         ("test_queues.py::test_a_wrong_row_is_never_delivered",)),
    Rule(2, "a layer is published only when its bundles are ready", "ssdgram/_publish.py",
         "            if status != SLOT_READY and status != SLOT_FAILED:\n                break\n", "",
         ("test_batch.py::test_wait_does_not_wait_for_other_layers", "test_batch.py::test_a_wait_of_no_time_is_a_look")),
    Rule(2, "a guessed slot is taken only if it is the bundle's", "ssdgram/_guess.py",
         "return slots[slot].x == x and slots[slot].group == group and slots[slot].where == IN_DIRECTORY", "return True",
         ("test_store.py::test_many_batches_in_flight_share_the_cache",)),
    Rule(2, "the crew takes READY bundles only", "ssdgram/_crew.py",
         "(holds(plan, slot, x, group.number) and plan.slots[slot].status == SLOT_READY):", "holds(plan, slot, x, group.number):",
         ("test_crew.py::test_bundles_that_are_being_read_are_left_to_the_planner",)),
    Rule(2, "what the crew left is planned before the batch goes on", "ssdgram/_lookup.py",
         "        if plan.chunks[k * chunk_words(plan) + K_LEFT] > 0 and settle_rest(plan, state, b, k) != PLANNED:", "        if False:",
         ("test_crew.py::test_mixed_batches_under_pressure",)),
    Rule(2, "a hot set's entries are checked row by row", "ssdgram/_hotset_load.py",
         "            if head_check(state, group, x, head, entry + ENTRY_HEAD + 4 * group.heads) != "
         "load_u32(entry + ENTRY_HEAD + 4 * head):",
         "            if False:",
         ("test_hotset.py::test_a_damaged_entry_is_dropped_and_read_anew",)),
    Rule(2, "a hot entry that the GPU found wrong is taken out again", "ssdgram/_hotset_gds.py",
         "            bad[job_entry[:count][wrong]] = 1", "            bad[job_entry[:count][wrong]] = 0",
         ("test_hotset_gds.py::test_a_damaged_entry_is_caught_by_the_check_and_read_anew",)),
    Rule(2, "a row that the GPU found wrong fails its page", "ssdgram/queues/_lanes.py",
         "        bad = lanes.results[k] != 0", "        bad = False",
         ("test_gds.py::test_a_corrupt_page_is_caught_by_the_check_and_read_again",
          "test_gds.py::test_a_page_that_is_corrupt_on_disk_delivers_its_right_rows_only")),
    Rule(2, "pages of queue gds wait for the GPU's word", "ssdgram/queues/_lanes.py",
         "atomic_load(lanes.words, lane * 8) < record.number", "False",
         ("test_gds.py::test_nothing_is_done_before_the_gpu_says_so",)),
    Rule(2, "rows are given out after the wait for their layer", "ssdgram/_gather.py",
         "    batch.wait(store.layers[index])\n    _run(gather_packed,", "    _run(gather_packed,",
         ("test_store_faults.py::test_nothing_of_another_batch_is_seen", "test_batch.py::test_a_wait_of_no_time_is_a_look")),
    Rule(2, "a copy in HBM is made when the GPU says so", "ssdgram/_hbm_tier.py",
         "        if atomic_load(plan.copy_word, 0) < control[C_COPY_REQUESTED]:", "        if False:",
         ("test_hbm_tier.py::test_a_copy_is_named_by_plans_once_the_gpu_has_made_it",)),
    Rule(2, "a copy in HBM is used only after it was made", "ssdgram/_lookup.py",
         "plan.hbm[plan.slots[slot].hbm].ready != 0", "True",
         ("test_hbm_tier.py::test_a_copy_is_named_by_plans_once_the_gpu_has_made_it",)),

    # ------------------------------------------------------------ 3: a failed read fails those who wait for it, and no more
    Rule(3, "a bundle with a row that could not be read is FAILED", "ssdgram/_slots.py",
         "    if slots[slot].failed != 0:", "    if False:",
         ("test_store_faults.py::test_nothing_of_another_batch_is_seen",)),
    Rule(3, "a bundle that failed is forgotten, and read anew", "ssdgram/_slots.py",
         "        forget(control, directory, slots, overflow, slot)\n        slots[slot].status = SLOT_FAILED",
         "        slots[slot].status = SLOT_FAILED",
         ("test_store_faults.py::test_what_failed_is_read_anew_while_the_failed_batch_is_kept",)),
    Rule(3, "a caller who planned has the drive watched", "ssdgram/_planner.py",
         "    if undone or not nothing_arrived(plan, state):", "    if False:",
         ("test_borrowed.py::test_a_caller_who_planned_wakes_a_thread_that_sleeps_for_ever",)),
    Rule(3, "a bad row spoils its bundle, not its page", "ssdgram/_pages.py",
         "(status != READ_CHECK or targets[target].bad != 0)", "True",
         ("test_store_faults.py::test_a_good_row_beside_a_bad_one_on_the_same_page",)),
    Rule(3, "a page that did not come whole is not delivered", "ssdgram/queues/_tries.py",
         "    if result == PAGE_BYTES:", "    if result > 0:",
         ("test_queues.py::test_a_file_that_ends_within_a_page",)),

    # ------------------------------------------------------------ 4: a batch may be cancelled at any time
    Rule(4, "reads under way hold their slots", "ssdgram/_pages.py",
         "    slots[slot].refs += 1\n    pages = 0", "    pages = 0",
         ("test_planner.py::test_cancelled_while_its_reads_are_in_the_drive",)),
    Rule(4, "what a cancelled batch built is read all the same", "ssdgram/_batches.py",
         "    if stage == EXPANDING:\n        plan.control[C_PUSH", "    if False:\n        plan.control[C_PUSH",
         ("test_cancelled_while_expanding.py::test_those_who_joined_get_their_rows",)),
    Rule(4, "a release is for the batch that was taken, not for the row's next", "ssdgram/_batches.py",
         "stage == FREE_BATCH or stage == SUBMITTED:", "stage == FREE_BATCH:",
         ("test_planner.py::test_a_release_that_comes_too_late_does_not_meet_the_next_batch",)),
    Rule(4, "staging of queue gds is filled again only after all its reads landed", "ssdgram/queues/_lanes.py",
         "        if lanes[lane].used == 0 and lanes[lane].lost == 0:", "        if lanes[lane].ready == 0 and lanes[lane].lost == 0:",
         ("test_gds.py::test_every_wanted_row_arrives",)),
    Rule(4, "memory that a drive may write to outlives the store", "ssdgram/store.py",
         "        if self._queue.stuck or any(thread.is_alive() for thread in self._threads):", "        if False:",
         ("test_store_lifetime.py::test_close_while_the_drive_does_not_answer",)),
    Rule(4, "a batch's arrays live until its row is free", "ssdgram/store.py",
         "        self._row_memory[row] = slots, held\n", "",
         ("test_planner_words.py::test_a_batchs_memory_lives_until_its_row_is_free",)),

    # ------------------------------------------------------------ 5: token history is positional; placeholders are refused
    Rule(5, "a chunk begins behind the outputs of those before it", "ssdgram/_crew.py",
         "            first += (flags[flat] & OUTPUT) != 0", "            first += 1",
         ("test_crew.py::test_lookback_and_sequences_meet_chunk_borders",)),
    Rule(5, "a sequence's first token has nothing before it", "kernels/hash.py",
         "blocked = flags[before] & STARTS or before == 0", "blocked = before == 0",
         ("test_hash.py::test_keys_are_the_twins",)),
    Rule(5, "a position that takes no part ends the n-grams over it", "kernels/hash.py",
         "blocked = not flags[before] & PARTICIPATES or (rule", "blocked = (rule",
         ("test_hash.py::test_keys_are_the_twins",)),
    Rule(5, "a position that takes no part is not looked up", "kernels/hash.py",
         "        blocked = not flags[position] & PARTICIPATES\n", "        blocked = False\n",
         ("test_hash.py::test_keys_are_the_twins",)),
    Rule(5, "an EOS ends a segment of PLE", "kernels/hash.py",
         " or (rule == PLE_RULE and tokens[before] == fill)", "",
         ("test_hash.py::test_keys_are_the_twins", "test_geometry.py::test_ple_rows")),
    Rule(5, "a negative id is no token", "kernels/hash.py",
         "(tokens[index] < 0 or tokens[index] >= vocab_size)", "(tokens[index] >= vocab_size)",
         ("test_hash.py::test_check_tokens", "test_geometry.py::test_ids_that_are_refused")),
    Rule(5, "ids from a device are checked before they are hashed", "ssdgram/_batches.py",
         "        if bad >= 0:\n            batch.bad_token = bad", "        if bad >= len(plan.keys):\n            batch.bad_token = bad",
         ("test_planner_words.py::test_a_bad_token_of_the_device_is_refused_before_it_is_hashed",)),
    Rule(5, "a history refuses placeholders that take part", "ssdgram/history.py",
         "flags & ((chunk.flat_tokens < 0) | (", "flags & ((",
         ("test_history.py::test_a_refused_append_changes_nothing",)),
    Rule(5, "a history remembers which positions took part", "ssdgram/history.py",
         "return self._tokens[start:stop].copy(), self._flags[start:stop].copy()",
         "return self._tokens[start:stop].copy(), np.ones(stop - start, bool)",
         ("test_history.py::test_random_scripts_equal_a_fresh_run",)),
    Rule(5, "a fork shares nothing", "ssdgram/history.py",
         "copy._flags, copy._length = self._tokens[:length].copy(), self._flags[:length].copy(), length",
         "copy._flags, copy._length = self._tokens, self._flags, length",
         ("test_history.py::test_random_scripts_equal_a_fresh_run",)),
    Rule(5, "a lookback is the tokens just before", "ssdgram/sequence.py",
         "self._wide.update(_clip_into(self.flat_tokens, before[cut:], 0))",
         "self._wide.update(_clip_into(self.flat_tokens, before[:kept], 0))",
         ("test_sequence.py::test_a_long_lookback_is_cut_to_what_can_count",)),
    Rule(5, "a lookback gives no rows of its own", "ssdgram/sequence.py",
         "            self.flat_flags[:kept] = PARTICIPATES\n", "            self.flat_flags[:kept] = PARTICIPATES | OUTPUT\n",
         ("test_sequence.py::test_flatten", "test_sequence.py::test_a_long_lookback_is_cut_to_what_can_count")),
    Rule(5, "the directory tells equal x of two orders apart", "cache/directory.py",
         "        if directory[s].x[way] == x and directory[s].group[way] == group:", "        if directory[s].x[way] == x:",
         ("test_directory.py::test_equal_x_stay_apart_even_where_their_fingerprints_agree",)),
    Rule(5, "the overflow table tells equal x of two orders apart", "cache/overflow.py",
         "(overflow[cell].x == x and overflow[cell].group == group)", "overflow[cell].x == x",
         ("test_overflow.py::test_equal_x_of_two_groups_are_two_entries",)),

    # ------------------------------------------------------------ 6: no pageable copy, no implicit synchronisation per step
    Rule(6, "a batch's plan lies in pinned memory", "ssdgram/_cuda.py",
         "return torch.empty(length, dtype=torch.uint8, pin_memory=True)", "return torch.empty(length, dtype=torch.uint8)",
         ("test_store_gpu.py::test_tokens_on_the_device_give_the_same_rows",), gpu=True),
    Rule(6, "tokens come from the GPU without a wait", "ssdgram/_cuda.py",
         ".copy_(ids, non_blocking=True)", ".copy_(ids)",
         ("test_store_gpu.py::test_a_step_waits_for_no_stream",), gpu=True),

    # ------------------------------------------------------------ 7: every page is bound to its store
    Rule(7, "a row's checksum covers the generation", "layout/page.py",
         "    state = crc32c_word(np.uint32(0xFFFFFFFF), generation)", "    state = crc32c_word(np.uint32(0xFFFFFFFF), 0)",
         ("test_page.py::test_row_check_of_known_bytes", "test_page.py::test_pages_equal_the_twin")),
    Rule(7, "a row's checksum covers layer and column", "layout/page.py",
         "    state = crc32c_word(state, np.int64(layer) | (np.int64(column) << 32))", "    state = crc32c_word(state, 0)",
         ("test_page.py::test_right_rows_under_another_identity_fail_by_their_own_check",)),
    Rule(7, "a row's checksum covers its number", "layout/page.py",
         "    state = crc32c_word(state, row)\n", "",
         ("test_page.py::test_row_check_of_known_bytes",)),
    Rule(7, "open looks at every file's first page", "ssdgram/_opening.py",
         "        if 1 <= fault & 0xFF <= 7:", "        if False:",
         ("test_store_errors.py::test_a_column_of_another_conversion_of_the_same_geometry", "test_store_errors.py::test_swapped_columns")),
    Rule(7, "a root is one only by its own stripe.json", "layout/files.py",
         "        check_stripe(root, manifest.generation, number, len(roots))", "        pass",
         ("test_files.py::test_moved_roots", "test_files.py::test_broken_stripe_json")),
    Rule(7, "a file lies where it should, below its root", "layout/files.py",
         "    if real != os.path.join(os.path.realpath(root), file.path):", "    if False:",
         ("test_files.py::test_links_are_not_followed",)),
    Rule(7, "a file has the manifest's size", "layout/files.py",
         "    if status.st_size != file.size:", "    if False:",
         ("test_files.py::test_other_size",)),
    Rule(7, "a token map has the manifest's digest", "layout/files.py",
         "    if map_digest(table) != expected.sha256:", "    if False:",
         ("test_files.py::test_tampered_token_map",)),
    Rule(7, "a hot set of another store is passed over", "ssdgram/hotset.py",
         "    if text != layout.header(store, count):", "    if False:",
         ("test_hotset.py::test_other_columns_or_another_store_are_passed_over",)),
    Rule(7, "a replaced manifest is noticed", "ssdgram/store.py",
         "        if identity(self.path) != self._identity:", "        if False:",
         ("test_store_errors.py::test_a_replaced_store_is_noticed",)),

    # ------------------------------------------------------------ 8: a forked child has nothing of its parent's store
    Rule(8, "a store knows its process", "ssdgram/store.py",
         "        return self._pid != _process", "        return False",
         ("test_store_fork.py::test_every_call_in_the_child_raises",)),
    Rule(8, "memory is not inherited", "ssdgram/_arena.py",
         "            _advise(address, size, MADV_DONTFORK)", "            pass",
         ("test_store_fork.py::test_nothing_is_inherited",)),
    Rule(8, "the shared memory's descriptors are not inherited", "ssdgram/store.py",
         "        self._arena.forget()", "        pass",
         ("test_store_fork.py::test_nothing_is_inherited",)),
    Rule(8, "page files are not inherited", "ssdgram/store.py",
         "        self._close_files()\n        self._queue.forget()", "        self._queue.forget()",
         ("test_store_fork.py::test_nothing_is_inherited",)),
    Rule(8, "rings are not inherited", "ssdgram/queues/uring.py",
         "            for descriptor in (ring.fd, int(own[flight.EVENT_FD])):", "            for descriptor in ():",
         ("test_store_fork.py::test_nothing_is_inherited",)),
    Rule(8, "a child unmaps nothing that it did not map", "ssdgram/_arena.py",
         "        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))", "        pass",
         ("test_store_fork.py::test_the_child_drops_the_memory_and_keeps_its_own",)),

    # ------------------------------------------------------------ the same where a server owns the store
    Rule(1, "served: a seat waits for its client's gathers", "ssdgram/serve/desk.py",
         "        if number > 0 and atomic_load(words,", "        if number < 0 and atomic_load(words,",
         ("test_serve_desk.py::test_gpu_words_are_awaited",)),
    Rule(1, "served: a batch that several hold ends with the last of them", "ssdgram/serve/desk.py",
         "        if desk.batch_rows[b].users == 0:\n            k = 0", "        if desk.batch_rows[b].users >= 0:\n            k = 0",
         ("test_serve.py::test_a_cancelled_batch_leaves_its_joiner_alone",)),
    Rule(1, "served: a server that stops takes nothing back from who still reads", "ssdgram/serve/server.py",
         "        self._arena.keep_shared()", "        super()._unwind(timeout_s)",
         ("test_serve_death.py::test_the_server_is_stopped",)),
    Rule(3, "served: nobody joins a batch that failed", "ssdgram/serve/desk.py",
         "and healthy(desk, b) and same_tokens", "and same_tokens",
         ("test_serve.py::test_who_joins_a_failed_batch_reads_anew",)),
    Rule(4, "served: what a dead client held is handed back", "ssdgram/serve/desk.py",
         "        if desk.seats[s].stage != EMPTY:\n            end_seat(desk, c, row)",
         "        if desk.seats[s].stage != EMPTY:\n            continue",
         ("test_serve_death.py::test_a_client_dies_between_prefetch_and_use",)),
    Rule(4, "served: a client's tokens are not looked at where it can change them", "ssdgram/serve/desk.py",
         "    tokens = view_i32(address_of(desk.tokens, b * params[DP_FLAT]), flat)",
         "    tokens = view_i32(desk.clients[c].tokens + 4 * row * params[DP_FLAT], flat)",
         ("test_serve_desk.py::test_tokens_that_change_while_they_are_planned",)),
    Rule(5, "served: ids of a client are checked by the server", "ssdgram/serve/desk.py",
         "ticket, tokens, flags, address_of(desk.arrived, b),", "ticket, tokens, flags, np.int64(0),",
         ("test_serve_desk.py::test_tokens_that_were_never_checked",)),
    Rule(8, "served: a client's socket is not inherited", "ssdgram/serve/client.py",
         "        self._connection.close()\n        for mapped in self._mapped:", "        for mapped in self._mapped:",
         ("test_serve_death.py::test_a_forked_child_of_a_client",)),
    Rule(8, "served: a server's descriptors are not inherited", "ssdgram/serve/server.py",
         "        server._forget()", "        pass",
         ("test_serve_death.py::test_a_forked_child_of_a_client",)),

    # ------------------------------------------------------------ what a staged step writes is in order with the caller's stream
    Rule(1, "a staged step's other stream runs behind the caller's", "ssdgram/staging.py",
         "                        self._beside.fork()\n", "",
         ("test_staging.py::test_pieces_lie_behind_one_another_and_run_between_fork_and_join",)),
    Rule(1, "the caller's stream runs behind a staged step's other one", "ssdgram/staging.py",
         "                    self._beside.join()", "                    pass",
         ("test_staging.py::test_pieces_lie_behind_one_another_and_run_between_fork_and_join",)),
    Rule(1, "a staged step's graphs lie before the fork", "ssdgram/staging.py",
         "                graph = None if forked else self._graph_for(", "                graph = self._graph_for(",
         ("test_staging.py::test_graphs_lie_before_the_fork",)),
    Rule(1, "gathers of distinct bundles that share tables are in order", "ssdgram/staging.py",
         "        with self._order(count):", "        with NOTHING:",
         ("test_staging.py::test_steps_that_share_tables_are_in_order",)),
    Rule(1, "... on whatever stream", "ssdgram/staging_gpu.py",
         "                torch.cuda.current_stream(self._device).wait_event(self._end)", "                pass",
         ("test_staging.py::test_a_stream_runs_behind_the_last_one",)),
    Rule(1, "the tables of a gather outlive whoever launched it", "ssdgram/staging.py",
         "                cuda.kept_by_row[batch._row] = self._distinct ", "                # ",
         ("test_staging.py::test_large_pieces_are_gathered_by_distinct_bundles",)),

    # ------------------------------------------------------------ 1 where a GPU is needed to see them
    Rule(1, "slots wait for the words (on the GPU)", "ssdgram/_batches.py",
         "        if mine.word != 0 and atomic_load_at(mine.word) < mine.expected:\n            return False",
         "        if False:\n            return False",
         ("test_store_gpu.py::test_slots_are_not_given_back_before_the_gpu_has_read_them",), gpu=True),
    Rule(1, "one batch's gathers on two streams end in order", "ssdgram/_cuda.py",
         "            wait_for_stream(before)", "            pass",
         ("test_store_gpu.py::test_one_batchs_gathers_on_two_streams_end_in_order",), gpu=True),
)
