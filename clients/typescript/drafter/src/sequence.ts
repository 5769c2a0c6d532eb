// The state of one sequence: the committed tokens, and a chain of guesses after them. No network
// here.
import { create } from "@bufbuild/protobuf";
import {
  DraftDistribution,
  type Opened,
  type Proposal,
  ProposalSchema,
  type Skip,
  SkipSchema,
  type SparseDistribution,
  SparseDistributionSchema,
  type Verdict,
  type Window,
} from "../gen/outrider/v1/drafts_pb.js";

const MAX_PROPOSAL_TOKENS = 1024;
// The least confidence that is sent: the contract allows no confidence of 0.
const LEAST_CONFIDENCE = 1e-6;

/** Guessed tokens, one after the other. */
export type Guesses = number[] | {
  tokens: number[];
  /** For each token the estimated probability that it is committed if the token before it is. */
  confidences?: number[];
  /** The distribution of each drawn token; sent where `Opened.distribution` is SPARSE. */
  distributions?: SparseDistribution[];
};
/** Guesses that `tokens` follow the first `at` guesses, instead of the later guesses. */
export type Branch = { at: number; tokens: number[]; confidences?: number[] };

export interface Strategy {
  /** At most `count` tokens that may follow the text. The text ends with the guesses so far. */
  guess(text: readonly number[], count: number): Guesses;
  /** Branches beside the chain, at most `room` tokens together. Chain and branches form a tree. */
  branch?(committed: readonly number[], guesses: readonly number[], room: number): Branch[];
}

export class Sequence {
  readonly committed: number[];
  guesses: number[] = [];
  private confidences: number[] = []; // of the guesses; 0 where none was given
  private wanted: number;
  private tree: number; // guesses of a tree, chain included, that are worth sending for a step
  private window: Window | undefined;
  private sent = 0;
  private distributions: SparseDistribution[] = []; // of the unsent guesses
  private givenUp = false; // the chain is not extended before the next verdict
  private branched = false;
  private skipped = false;

  constructor(private readonly opened: Opened, private readonly strategy: Strategy) {
    this.committed = [...opened.tokenIds];
    this.wanted = opened.draftTokens;
    this.tree = opened.treeTokens;
    this.window = opened.window;
  }

  /**
   * Applies a verdict. A verdict without new tokens changes nothing. Throws if the verdict leaves a
   * gap.
   */
  follow(verdict: Verdict): void {
    const fresh = verdict.committedLength - this.committed.length;
    if (fresh > verdict.newTokenIds.length) {
      throw new Error(`a verdict of sequence ${verdict.sequenceId} leaves a gap`);
    }
    if (fresh <= 0) return;
    const added = verdict.newTokenIds.slice(verdict.newTokenIds.length - fresh);
    const agrees = added.every((token, i) => i >= this.guesses.length || token === this.guesses[i]);
    this.committed.push(...added);
    this.guesses = agrees ? this.guesses.slice(added.length) : [];
    this.confidences = agrees ? this.confidences.slice(added.length) : [];
    this.sent = agrees ? Math.max(0, this.sent - added.length) : 0;
    this.distributions = [];
    this.givenUp = this.branched = this.skipped = false;
    this.wanted = verdict.draftTokens;
    this.tree = verdict.treeTokens;
    this.window = verdict.window ?? this.window;
  }

  /** How many more guesses the chain may have. */
  get room(): number {
    if (this.givenUp || this.window === undefined) return 0;
    const most = Math.min(this.window.depth, this.window.tokenCount, MAX_PROPOSAL_TOKENS);
    return Math.max(0, most - this.guesses.length);
  }

  /**
   * How many tokens branches may have together: as many as the next step can verify in a tree
   * beside the chain, or, where the drafter runs ahead, as many as the window has room for.
   */
  private get branchRoom(): number {
    const { tokenCount = 0, depth = 0 } = this.window ?? {};
    let most = Math.min(tokenCount, MAX_PROPOSAL_TOKENS);
    if (this.tree > this.wanted) most = Math.min(most, this.tree);
    else if (depth <= this.wanted) return 0;
    return Math.max(0, most - this.guesses.length);
  }

  /** Whether the verifier may be waiting for guesses. */
  get urgent(): boolean {
    return this.guesses.length < this.wanted && this.room > 0;
  }

  /**
   * Asks the strategy for the guesses that the verifier's next step lacks. If the step lacks none,
   * asks for the guesses of one more step.
   */
  extend(): void {
    const lacking = this.urgent ? this.wanted - this.guesses.length : this.wanted;
    const count = Math.min(lacking, this.room);
    const found = count > 0 ? this.strategy.guess([...this.committed, ...this.guesses], count) : [];
    const { tokens: all, confidences = [], distributions = [] } =
      Array.isArray(found) ? { tokens: found } : found;
    const tokens = all.slice(0, count);
    this.guesses.push(...tokens);
    this.confidences.push(...tokens.map((_, i) => confidences[i] ?? 0));
    const sampled = this.opened.distribution === DraftDistribution.SPARSE;
    if (sampled) this.distributions.push(...distributions.slice(0, count));
    this.givenUp = tokens.length === 0;
  }

  /**
   * A proposal of all guesses, sent and unsent, so it needs no earlier proposal. Unless the guesses
   * were sampled, it also has the strategy's branches. Undefined if no guess is unsent.
   */
  proposal(): Proposal | undefined {
    if (this.sent === this.guesses.length) return undefined;
    const place = { sequenceId: this.opened.sequenceId, baseLength: this.committed.length };
    const proposal = create(ProposalSchema, { ...place, tokenIds: [...this.guesses] });
    if (this.distributions.length > 0) {
      // A distribution without ids stands for the distribution that came with the same token
      // before.
      const length = this.guesses.length - this.distributions.length;
      const before = Array.from({ length }, () => create(SparseDistributionSchema));
      proposal.distributions = [...before, ...this.distributions];
      this.distributions = [];
    } else {
      this.addBranches(proposal);
    }
    this.sent = this.guesses.length;
    return proposal;
  }

  /** Adds to the proposal the strategy's branches that have room, and the confidences of all. */
  private addBranches(proposal: Proposal): void {
    const given = [...this.confidences];
    for (const { at, tokens, confidences = [] } of this.branches()) {
      if (proposal.parents.length === 0) proposal.parents = this.guesses.map((_, i) => i);
      // As a parent, 0 is the base and j is tokenIds[j - 1].
      tokens.forEach((token, i) => {
        proposal.parents.push(i === 0 ? at : proposal.tokenIds.length);
        proposal.tokenIds.push(token);
        given.push(confidences[i] ?? 0);
      });
    }
    proposal.confidences = complete(given);
  }

  /** The strategy's branches that have room. Asks the strategy once for each verdict. */
  private branches(): Branch[] {
    let room = this.branchRoom;
    if (this.strategy.branch === undefined || this.branched || room === 0) return [];
    this.branched = true;
    const depth = this.window?.depth ?? 0;
    return this.strategy.branch(this.committed, this.guesses, room).filter(({ at, tokens }) => {
      const isInChain = at >= 0 && at <= this.guesses.length;
      const fits = isInChain && tokens.length <= room && at + tokens.length <= depth;
      if (fits) room -= tokens.length;
      return fits;
    });
  }

  /**
   * The message that no more guesses come. It is made once for each committed length, and only if
   * the verifier may be waiting for more.
   */
  skip(): Skip | undefined {
    if (this.skipped || this.room > 0 || this.guesses.length >= this.wanted) return undefined;
    this.skipped = true;
    const place = { sequenceId: this.opened.sequenceId, baseLength: this.committed.length };
    return create(SkipSchema, place);
  }
}

/** Confidences as the contract demands: one in (0, 1] for each token, or none at all. */
function complete(given: number[]): number[] {
  if (given.some((confidence) => !confidence)) return []; // 0, or not a number
  return given.map((confidence) => Math.min(1, Math.max(LEAST_CONFIDENCE, confidence)));
}
