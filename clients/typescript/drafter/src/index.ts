// Make an Outrider drafter: `await serve({ verifier, family, guess })`. Outrider's docs/protocol.md
// has the contract.
export { type Options, serve } from "./serve.js";
export { type Branch, type Guesses, type Strategy } from "./sequence.js";
export { draw } from "./noise.js";
export {
  DraftDistribution,
  type Opened,
  type SparseDistribution,
} from "../gen/outrider/v1/drafts_pb.js";
