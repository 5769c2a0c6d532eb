// Write a drafter for Outrider: `await serve({ verifier, family, guess })`. docs/protocol.md of Outrider has the contract.
export { type Options, serve } from "./serve.js";
export { type Branch, type Guesses, type Strategy } from "./sequence.js";
export { draw } from "./noise.js";
export { DraftDistribution, type Opened, type SparseDistribution } from "../gen/outrider/v1/drafts_pb.js";
