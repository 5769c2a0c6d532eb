// A tree of guesses names its parents and confidences as the contract has them.
import { deepStrictEqual } from "node:assert";
import { create } from "@bufbuild/protobuf";
import { OpenedSchema } from "../gen/outrider/v1/drafts_pb.js";
import { Sequence, type Strategy } from "../src/sequence.js";

function proposed(confidences: number[] | undefined) {
  const strategy: Strategy = {
    guess: () => ({ tokens: [6, 7], confidences }),
    branch: (_committed, _guesses, room) => [
      { at: 1, tokens: [8, 9], confidences: [0.25, 2] },
      { at: 3, tokens: [1] },
      { at: 0, tokens: new Array(room + 1).fill(1) },
    ],
  };
  const window = { tokenCount: 32, depth: 3 };
  const opened = create(OpenedSchema, { tokenIds: [5], draftTokens: 2, treeTokens: 8, window });
  const sequence = new Sequence(opened, strategy);
  sequence.extend();
  return sequence.proposal();
}

const whole = proposed([0.5, 1]);
deepStrictEqual(whole?.tokenIds, [6, 7, 8, 9]);
deepStrictEqual(whole?.parents, [0, 1, 1, 3]);
deepStrictEqual(whole?.confidences, [0.5, 1, 0.25, 1]);
// Confidences are sent for all tokens or none.
deepStrictEqual(proposed(undefined)?.confidences, []);
console.log("ok sequence");
